"""Federated learning for devices of every size.

Give each device a budget in bytes, get one model trained by all of them. The names below are
imported when first used, so that `import sizewise` and `sizewise list` stay fast.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sizewise.anatomy import Anatomy, Staged, anatomy
    from sizewise.api import FinishedRun, federate
    from sizewise.config import Config
    from sizewise.errors import BudgetTooSmall, SizewiseError
    from sizewise.federation import Federation
    from sizewise.fleet import Device, Fleet
    from sizewise.memory import Footprint, Meter, OutOfBudget, predict
    from sizewise.merge import CoverageMean
    from sizewise.method import Method
    from sizewise.plan import Piece, Plan, Refusal, Stage, Update
    from sizewise.recipe import Recipe
    from sizewise.state import State
    from sizewise.view import Slot, View

__version__ = "0.1.0"

_HOMES = {
    "anatomy": ("Anatomy", "Staged", "anatomy"),
    "api": ("FinishedRun", "federate"),
    "config": ("Config",),
    "errors": ("BudgetTooSmall", "SizewiseError"),
    "federation": ("Federation",),
    "fleet": ("Device", "Fleet"),
    "memory": ("Footprint", "Meter", "OutOfBudget", "predict"),
    "merge": ("CoverageMean",),
    "method": ("Method",),
    "plan": ("Piece", "Plan", "Refusal", "Stage", "Update"),
    "recipe": ("Recipe",),
    "state": ("State",),
    "view": ("Slot", "View"),
}

__all__ = [
    "Anatomy",
    "BudgetTooSmall",
    "Config",
    "CoverageMean",
    "Device",
    "Federation",
    "FinishedRun",
    "Fleet",
    "Footprint",
    "Meter",
    "Method",
    "OutOfBudget",
    "Piece",
    "Plan",
    "Recipe",
    "Refusal",
    "SizewiseError",
    "Slot",
    "Stage",
    "Staged",
    "State",
    "Update",
    "View",
    "anatomy",
    "federate",
    "predict",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"sizewise.{module}"), name)
    raise AttributeError(f"module 'sizewise' has no attribute {name!r}")
