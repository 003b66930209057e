"""Devices that keep a model of their own from round to round: the base of methods that deploy them.

A device's model is made of its device state and of what the server has of its submodel. People run
these models, one for each device that has trained, and a run is as good as they are in the mean.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from sizewise.common.structure import build, plain
from sizewise.exchange.plan import Submodel, Update, observed
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families.base import Deployed, Method


@dataclass(frozen=True)
class Holdings:
    """What the server notes: the submodel of each device, as plain values, by its number."""

    submodels: Mapping[str, Any]


class OwnModels(Method):
    """FedAvg of what the server has; every device runs its own model."""

    def setup(self) -> State:
        """Return the start, when no device has a model yet."""
        return super().setup().noting(Holdings({}))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state, and who has which submodel."""
        held = dict(state.facts(Holdings).submodels)

        def note(update: Update) -> None:
            held[str(update.plan.device)] = plain(update.plan.submodel)

        return super().merge(state, observed(updates, note)).noting(Holdings(held))

    def unclipped(self) -> str:
        """Return that devices' own models are what people run."""
        return "people run models that devices keep, to which no noise is added; use another method"

    def own_model(self, state: State, submodel: Any, device_state: Tensors) -> nn.Module:
        """Return the model of a device that remembers this; nothing, before it has trained."""
        raise NotImplementedError

    def deploy(self, state: State) -> Mapping[str, Deployed]:
        """Return every device's own model; before any has trained, the start of each size."""
        held = state.facts(Holdings).submodels
        if not held:
            start = {s.label: partial(self.own_model, state, s, {}) for s in self.sizes(state)}
            return {label: Deployed(fill) for label, fill in start.items()}
        found = {}
        for number in sorted(map(int, held)):
            submodel = build(self.submodel_type, held[str(number)])
            remembered = partial(self._remembered, state, submodel, number)
            found[self.name_of(number, submodel)] = Deployed(remembered, number)
        return found

    def _remembered(self, state: State, submodel: Submodel, number: int) -> nn.Module:
        return self.own_model(state, submodel, state.devices.get(number, {}))

    def name_of(self, number: int, submodel: Submodel) -> str:
        """Return what people call a device's model."""
        return f"device {number} ({submodel.label})"

    def summary_metric(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy over the devices."""
        return sum(sizes.values()) / len(sizes)
