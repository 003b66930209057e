"""Plans that are alike but for their devices go together, and no others."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sizewise.exchange.plan import Submodel, Plan, TrainingStage, portions

KINDS = [
    Plan(0, 3, "any", Submodel("full", {"width": 1.0}), (TrainingStage(0.1, 1),)),
    Plan(0, 3, "any", Submodel("half", {"width": 0.5}), (TrainingStage(0.1, 1),)),
    Plan(0, 3, "any", Submodel("full", {"width": 1.0}), (TrainingStage(0.2, 1),)),
    Plan(0, 3, "any", Submodel("full", {"width": 1.0}), (TrainingStage(0.1, 1),), budget=9),
]


def test_runs_by_hand() -> None:
    plans = [replace(KINDS[kind], device=number) for number, kind in enumerate([0, 0, 0, 1, 0, 3])]
    devices = [[plan.device for plan in run] for run in portions(plans, lambda plan: 2)]
    assert devices == [[0, 1], [2], [3], [4], [5]]


@given(
    kinds=st.lists(st.integers(0, len(KINDS) - 1), max_size=30),
    most=st.integers(0, 5),
)
def test_nothing_is_lost_and_runs_are_alike(kinds: list[int], most: int) -> None:
    plans = [replace(KINDS[kind], device=number) for number, kind in enumerate(kinds)]
    found = portions(plans, lambda plan: most)
    assert [plan for run in found for plan in run] == plans
    for run in found:
        assert len(run) <= max(most, 1)
        assert all(replace(plan, device=0) == replace(run[0], device=0) for plan in run)
