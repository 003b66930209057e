"""Federated learning for devices of every size.

Give each device a budget in bytes, get one model trained by all of them. The names below are
imported when first used, so that `import sizewise` and `sizewise list` stay fast.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sizewise.api.comparing import Comparison, compare
    from sizewise.api.planning import Preview, Recommendation, advise, plan
    from sizewise.api.running import FinishedRun, federate, resume
    from sizewise.config import Config
    from sizewise.errors import BudgetTooSmall, SizewiseError
    from sizewise.exchange.coverage_mean import CoverageMean
    from sizewise.exchange.plan import Plan, Refusal, Submodel, TrainingStage, Update, Work
    from sizewise.exchange.state import State
    from sizewise.exchange.traffic import Traffic
    from sizewise.exchange.view import TensorSlice, View
    from sizewise.families.base import Deployed, Method
    from sizewise.families.submodels import Submodels, Width
    from sizewise.fleet.devices import Device, Fleet
    from sizewise.memory.prediction import Footprint, Meter, OutOfBudget, predict
    from sizewise.runs import deployment, session
    from sizewise.runs.federation import Federation
    from sizewise.steps.recipe import Recipe
    from sizewise.surgery.anatomy import Anatomy, Staged, anatomy

__version__ = "0.2.0"

_HOMES = {
    "surgery.anatomy": ("Anatomy", "Staged", "anatomy"),
    "api.comparing": ("Comparison", "compare"),
    "api.planning": ("Preview", "Recommendation", "advise", "plan"),
    "api.running": ("FinishedRun", "federate", "resume"),
    "config": ("Config",),
    "errors": ("BudgetTooSmall", "SizewiseError"),
    "runs": ("deployment", "session"),
    "runs.federation": ("Federation",),
    "fleet.devices": ("Device", "Fleet"),
    "memory.prediction": ("Footprint", "Meter", "OutOfBudget", "predict"),
    "exchange.coverage_mean": ("CoverageMean",),
    "families.base": ("Deployed", "Method"),
    "families.submodels": ("Submodels", "Width"),
    "exchange.plan": ("Plan", "Refusal", "Submodel", "TrainingStage", "Update", "Work"),
    "steps.recipe": ("Recipe",),
    "exchange.state": ("State",),
    "exchange.traffic": ("Traffic",),
    "exchange.view": ("TensorSlice", "View"),
}

__all__ = [
    "Anatomy",
    "BudgetTooSmall",
    "Comparison",
    "Config",
    "CoverageMean",
    "Deployed",
    "Device",
    "Federation",
    "FinishedRun",
    "Fleet",
    "Footprint",
    "Meter",
    "Method",
    "OutOfBudget",
    "Plan",
    "Preview",
    "Recipe",
    "Recommendation",
    "Refusal",
    "SizewiseError",
    "Staged",
    "State",
    "Submodel",
    "Submodels",
    "TensorSlice",
    "Traffic",
    "TrainingStage",
    "Update",
    "View",
    "Width",
    "Work",
    "advise",
    "anatomy",
    "compare",
    "deployment",
    "federate",
    "plan",
    "predict",
    "resume",
    "session",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            home = importlib.import_module(f"sizewise.{module}")
            if not hasattr(home, name):  # It is a module itself.
                return importlib.import_module(f"sizewise.{module}.{name}")
            return getattr(home, name)
    raise AttributeError(f"module 'sizewise' has no attribute {name!r}")
