"""What of a model no device of a fleet trains, so that it stays as it began. Trains nothing.

A method may run on a fleet whose devices, by their bytes, leave out some layer each time: the run
goes well, and its model is as good as that layer's first values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Plan
from sizewise.exchange.view import View
from sizewise.fleet.devices import Device
from sizewise.runs.preparation import Setting

ROUNDS = 20
"""So many rounds are looked at, evenly spread over the run: what is trained may go by the round."""

SHOWN = 4
"""Tensors that a sentence names."""


@dataclass(frozen=True)
class Untrained:
    """What stays as it began.

    Attributes:
        names: The server's names of the tensors.
        share: Their share, 0 to 1, of the entries that a device without a budget would train.
    """

    names: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        """Return it as a sentence."""
        share = "less than 1 %" if self.share < 0.01 else f"{100 * self.share:.0f} %"
        named = ", ".join(self.names[:SHOWN])
        more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        return (
            f"no device trains {share} of the model, which stays as it began: {named}{more}; give "
            "some devices more bytes, or try recipe.levers = 'auto' or another method"
        )


def untrained(setting: Setting) -> Untrained | None:
    """Return what the largest model that people run has and no device trains; None if all is.

    Tensors count as trained if some device trains a part of them.
    """
    method, state = setting.method, setting.start
    view = method.submodels.view(method.sizes(state)[-1])
    shown = {place.name for place in view.values()}
    trained: set[str] = set()
    possible: set[str] = set()
    for device, round_index in _asked(setting):
        for asked, found in ((device, trained), (replace(device, memory=None), possible)):
            try:
                plan = method.plan_upper_bound(state, asked, round_index)
            except BudgetTooSmall:
                continue
            found |= _places(setting, plan) & shown
    if not trained or possible <= trained:
        return None
    entries = {name: state.tensors[name].numel() for name in possible}
    left = tuple(name for name in state.tensors if name in possible - trained)
    return Untrained(left, sum(entries[name] for name in left) / sum(entries.values()))


def _asked(setting: Setting) -> Iterator[tuple[Device, int]]:
    """Yield a device of each class in some rounds from when there is one."""
    last = setting.config.rounds - 1
    for device, first, _ in setting.fleet.classes():
        rounds = {first + (last - first) * i // (ROUNDS - 1) for i in range(ROUNDS)}
        yield from ((device, round_index) for round_index in sorted(rounds))


def _places(setting: Setting, plan: Plan) -> set[str]:
    """Return the server's names of what a plan trains and sends back."""
    submodels = setting.method.submodels
    if not setting.method.traffic(plan, 1).returns:
        return set()
    view: View = submodels.view(plan.submodel)
    return {view[name].name for name in submodels.trained_names(plan)}
