"""What a robust merge will meet in a run: enough devices for each entry or not, and bytes.

The first rounds are planned as the run will plan them, with the devices that its seed draws, and
for every entry the devices whose updates will hold it are counted. Nothing is trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sizewise.common.structure import format_bytes
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange import merge_rules, robust_rules
from sizewise.exchange.coverage_mean import EntryWeights
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import View, view_in_bytes
from sizewise.fleet.attackers import drawn
from sizewise.runs.preparation import Setting

ROUNDS = 10
"""So many of the first rounds are looked at."""


@dataclass(frozen=True)
class Outlook:
    """What a merge will meet.

    Attributes:
        rule: How updates are merged.
        attackers: How many devices of a round may lie.
        needed: How many devices must hold an entry for that.
        rounds: How many rounds were looked at.
        thin: The share, 0 to 1, of what devices train in them that fewer devices hold.
        least: The fewest devices that hold an entry which somebody trains.
        policy: What becomes of such entries.
        server_bytes: What merging takes at most, beside the model: all updates of a round, if they
            are kept, and what a rule needs.
    """

    rule: str
    attackers: int
    needed: int
    rounds: int
    thin: float
    least: int
    policy: str
    server_bytes: int

    def __str__(self) -> str:
        """Return it as a sentence."""
        holds = f"{format_bytes(self.server_bytes)} on the server"
        if self.needed == 1:
            return f"merge {self.rule}: {holds}"
        liars = "1 attacker" if self.attackers == 1 else f"{self.attackers} attackers"
        said = f"merge {self.rule} against {liars} in a round: {holds}"
        looked = "the first round" if self.rounds == 1 else f"the first {self.rounds} rounds"
        if not self.thin:
            return f"{said}; in {looked} all that is trained is held by {self.needed} or more"
        becomes = {
            "keep": "and keeps its values",
            "merge": "and is merged all the same, so that one liar may decide",
            "refuse": "which recipe.merge_thin = 'refuse' does not let pass",
        }
        share = "less than 1 %" if self.thin < 0.01 else f"{100 * self.thin:.0f} %"
        return (
            f"{said}; in {looked} {share} of what is trained is held by fewer devices than the "
            f"{self.needed} that this takes (some by {self.least}), {becomes[self.policy]}"
        )


def outlook(setting: Setting) -> Outlook | None:
    """Return what a run's merge will meet; None if it is the mean, which streams."""
    config, method, state = setting.config, setting.method, setting.start
    recipe = config.recipe
    if recipe.merge == "mean":
        return None
    attackers = drawn(config.fleet.attack, setting.fleet, config.seed)
    needed, rounds = robust_rules.needed(recipe), min(ROUNDS, config.rounds)
    thin = trained = 0.0
    least, most, kept = config.fleet.per_round, 0, 0
    for round_index in range(rounds):
        views = []
        for device in setting.fleet.sample(config.seed, round_index):
            try:
                plan = method.plan(state, attackers.seen(device), round_index)
            except BudgetTooSmall:
                continue
            views.append(_trained(setting, plan))
        sent = [view_in_bytes(view, state.tensors) for view in views]
        kept, most = max(kept, sum(sent)), max(most, len(sent))
        for weight, entries in _counted(views, state):
            trained += entries
            thin += entries if weight < needed else 0
            least = min(least, int(weight))
    beside = merge_rules.bytes_beside(recipe, state.tensors, most)
    return Outlook(
        recipe.merge,
        recipe.merge_attackers,
        needed,
        rounds,
        thin / trained if trained else 0.0,
        least,
        recipe.merge_thin,
        beside + (0 if merge_rules.streams(recipe) else kept),
    )


def check(found: Outlook | None) -> None:
    """Raise ConfigError if a run must not start with a merge that does not hold everywhere."""
    if found is not None and found.thin and found.policy == "refuse":
        raise ConfigError(
            f"{found}; lower recipe.merge_attackers, raise fleet.per_round, or set "
            f"recipe.merge_thin to 'keep'"
        )


def _trained(setting: Setting, plan: Plan) -> View:
    """Return where the tensors live that a device sends back."""
    submodels = setting.method.submodels
    names = submodels.trained_names(plan) if setting.method.traffic(plan, 1).returns else ()
    return {name: place for name, place in submodels.view(plan.submodel).items() if name in names}


def _counted(views: Iterable[View], state: State) -> Iterable[tuple[float, float]]:
    """Yield by how many devices entries are held, and how many entries; only of what is trained."""
    held: dict[str, EntryWeights] = {}
    for view in views:
        for place in view.values():
            tensor = state.tensors[place.name]
            if tensor.is_floating_point():
                held.setdefault(place.name, EntryWeights(tensor)).add(place.index, 1.0)
    for name, weights in held.items():
        total, entries = torch.as_tensor(weights.total()), state.tensors[name].numel()
        for weight, count in zip(*torch.unique(total, return_counts=True), strict=True):
            if weight > 0:
                yield float(weight), float(count) * entries / total.numel()
