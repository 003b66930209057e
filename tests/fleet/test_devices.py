from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.errors import ConfigError
from sizewise.fleet.devices import (
    Device,
    EventConfig,
    Fleet,
    FleetConfig,
    GroupConfig,
    class_name,
)
from sizewise.fleet.making import make_fleet


def fleet_of(config: FleetConfig) -> Fleet:
    return make_fleet(config, lambda share: round(share * 2400))


def memories(fleet: Fleet, round_index: int = 0) -> list[int | None]:
    present = range(fleet.present(round_index))
    return [fleet.device(number, round_index).memory for number in present]


@pytest.mark.parametrize(
    ("scenario", "budgets"),
    [
        ("fair", (400, 800, 1200, 2400)),
        ("lack", (300, 400, 1200, 2400)),
        ("surplus", (400, 800, 1200, 4800)),
    ],
)
def test_scenarios_are_dealt_in_quarters(scenario: str, budgets: tuple[int, ...]) -> None:
    fleet = fleet_of(FleetConfig(devices=8, scenario=scenario))
    assert memories(fleet) == [budget for budget in budgets for _ in range(2)]
    assert fleet.device(0, 0).group == ("1/8" if scenario == "lack" else "1/6")


@given(st.integers(1, 200), st.integers(1, 6))
def test_device_k_gets_budget_floor_of_nk_over_all(devices: int, kinds: int) -> None:
    kinds = min(devices, kinds)
    budgets = tuple(range(1000, 1000 + kinds))
    fleet = fleet_of(FleetConfig(devices=devices, per_round=1, budgets=budgets))
    assert memories(fleet) == [budgets[kinds * k // devices] for k in range(devices)]
    assert fleet.total == devices


def test_scenario_asks_for_its_shares_only_when_it_is_used() -> None:
    asked: list[float] = []

    def bytes_of_share(share: float) -> int:
        asked.append(share)
        return 100

    make_fleet(FleetConfig(budgets=(5000,)), bytes_of_share)
    assert asked == []
    make_fleet(FleetConfig(scenario="lack"), bytes_of_share)
    assert asked == [1 / 8, 1 / 6, 1 / 2, 1]


def test_ratios_become_bytes_and_are_remembered() -> None:
    fleet = fleet_of(FleetConfig(devices=5, ratios=(0.5, 1)))
    assert [fleet.device(n, 0) for n in (0, 2, 3)] == [
        Device(0, "0.5 model", 1200, ratio=0.5),
        Device(2, "0.5 model", 1200, ratio=0.5),
        Device(3, "1 model", 2400, ratio=1),
    ]
    scenario = fleet_of(FleetConfig(devices=8, scenario="surplus"))
    assert scenario.device(7, 0) == Device(7, "2", 4800, ratio=2.0)


def test_groups_take_ratios_and_bytes_that_are_given_win() -> None:
    groups = (GroupConfig(1, ratio=0.5), GroupConfig(1, 999, "odd", ratio=0.25), GroupConfig(3))
    fleet = fleet_of(FleetConfig(group=groups))
    assert [fleet.device(n, 0) for n in range(3)] == [
        Device(0, "0.5 model", 1200, ratio=0.5),
        Device(1, "odd", 999, ratio=0.25),
        Device(2, "any"),
    ]


def test_budgets_and_ratios_of_a_fleet_are_told_once_each_and_in_order() -> None:
    groups = (GroupConfig(2), GroupConfig(1, ratio=1), GroupConfig(2, ratio=0.5), GroupConfig(1))
    events = (EventConfig(2, 300, join=1), EventConfig(3, 5000, upgrade="1 model"))
    fleet = fleet_of(FleetConfig(group=groups, event=events))
    assert fleet.budgets() == (300, 1200, 2400, 5000, None)
    assert fleet.ratios() == (0.5, 1)
    assert fleet_of(FleetConfig()).budgets() == (None,)
    assert fleet_of(FleetConfig()).ratios() == ()


def test_upgraded_devices_have_no_ratio_any_more() -> None:
    event = EventConfig(2, 9000, upgrade="0.5 model", count=1)
    fleet = fleet_of(FleetConfig(devices=5, ratios=(0.5,), event=(event,)))
    assert fleet.device(0, 0).ratio == 0.5
    assert fleet.device(0, 1) == Device(0, "9kB", 9000)
    assert fleet.device(1, 1).ratio == 0.5


def test_turns_count_all_devices_that_were_asked() -> None:
    fleet = fleet_of(FleetConfig(devices=9, per_round=4))
    turns = [device.turn for r in range(3) for device in fleet.sample(0, r)]
    assert turns == list(range(12))


def test_fleet_without_budgets_is_unlimited() -> None:
    assert fleet_of(FleetConfig(devices=5)).device(4, 0) == Device(4, "any", None)


def test_groups_keep_their_names_speeds_and_order() -> None:
    groups = (GroupConfig(2, 3000, "phone", 1e9, 1e6), GroupConfig(1, 20_000_000))
    fleet = fleet_of(FleetConfig(group=groups, per_round=3))
    assert [fleet.device(n, 0) for n in range(3)] == [
        Device(0, "phone", 3000, 1e9, 1e6),
        Device(1, "phone", 3000, 1e9, 1e6),
        Device(2, "20MB", 20_000_000),
    ]
    assert [(d.id, when, count) for d, when, count in fleet.classes()] == [(0, 0, 2), (2, 0, 1)]


@pytest.mark.parametrize(
    ("memory", "name"),
    [(None, "any"), (20_000_000, "20MB"), (1500, "1.5kB"), (999, "999B"), (2 * 10**9, "2GB")],
)
def test_class_names(memory: int | None, name: str) -> None:
    assert class_name(memory) == name


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 50), st.data())
def test_sampling_is_without_replacement_and_in_order(
    seed: int, round_index: int, devices: int, data: st.DataObject
) -> None:
    per_round = data.draw(st.integers(1, devices))
    fleet = fleet_of(FleetConfig(devices=devices, per_round=per_round))
    numbers = [device.id for device in fleet.sample(seed, round_index)]
    assert len(set(numbers)) == per_round
    assert numbers == sorted(numbers)
    assert all(0 <= number < devices for number in numbers)


def test_sampling_depends_on_seed_and_round_alone() -> None:
    plain, rich = FleetConfig(devices=50), FleetConfig(devices=50, budgets=(5000, 6000))
    fleet, other = fleet_of(plain), fleet_of(rich)
    forwards = [[d.id for d in fleet.sample(3, r)] for r in range(10)]
    backwards = [[d.id for d in other.sample(3, r)] for r in reversed(range(10))]
    assert forwards == backwards[::-1]
    assert len({tuple(numbers) for numbers in forwards}) > 1
    assert forwards[0] != [d.id for d in fleet.sample(4, 0)]


def test_every_device_is_sampled_about_as_often() -> None:
    fleet = fleet_of(FleetConfig(devices=10, per_round=5))
    counts = Counter(device.id for r in range(400) for device in fleet.sample(0, r))
    assert len(counts) == 10
    assert all(150 < count < 250 for count in counts.values())


def test_million_devices_are_made_only_when_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Fleet.device

    def counting(self: Fleet, number: int, round_index: int) -> Device:
        made.append(number)
        return make(self, number, round_index)

    monkeypatch.setattr(Fleet, "device", counting)
    config = FleetConfig(devices=1_000_000, per_round=7, budgets=(5000, 6000, 7000, 8000))
    fleet = fleet_of(config)
    assert len(fleet.groups) == 4
    assert made == []
    assert fleet.total == fleet.present(0) == 1_000_000
    sampled = fleet.sample(0, 0)
    assert made == [device.id for device in sampled]
    assert len(made) == 7
    assert [d.memory for d in sampled] == [config.budgets[4 * d.id // 1_000_000] for d in sampled]


def test_joiners_come_last_and_from_their_round_on() -> None:
    events = (EventConfig(5, 9000, join=1), EventConfig(3, 8000, join=2))
    fleet = fleet_of(FleetConfig(devices=5, per_round=5, budgets=(5000,), event=events))
    assert [fleet.present(r) for r in range(6)] == [5, 5, 7, 7, 8, 8]
    assert fleet.total == 8
    assert memories(fleet, 4) == [5000] * 5 + [8000] * 2 + [9000]
    assert {d.id for r in range(2) for d in fleet.sample(0, r)} == set(range(5))
    assert {d.id for r in range(2, 50) for d in fleet.sample(0, r)} == set(range(8))
    assert [when for _, when, _ in fleet.classes()] == [0, 2, 4]


def test_upgrade_holds_from_its_round_on_for_the_first_of_a_class() -> None:
    events = (EventConfig(3, 9000, upgrade="6kB", count=1), EventConfig(4, 9500, upgrade="6kB"))
    fleet = fleet_of(FleetConfig(devices=5, budgets=(5000, 6000), event=events))
    assert memories(fleet, 1) == [5000, 5000, 5000, 6000, 6000]
    assert memories(fleet, 2) == [5000, 5000, 5000, 9000, 6000]
    assert memories(fleet, 3) == [5000, 5000, 5000, 9000, 9500], "the other is 6kB no more"
    assert fleet.device(3, 2).group == "9kB"
    assert [(d.group, when, n) for d, when, n in fleet.classes()] == [
        ("5kB", 0, 3),
        ("6kB", 0, 2),
        ("9kB", 2, 1),
        ("9.5kB", 3, 1),
    ]


def test_upgrade_of_more_devices_than_there_are_is_all_of_them() -> None:
    event = EventConfig(1, 9000, upgrade="5kB", count=99)
    fleet = fleet_of(FleetConfig(devices=5, budgets=(5000,), event=(event,)))
    assert memories(fleet) == [9000] * 5
    assert fleet.upgrades[0][2] == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FleetConfig(devices=0), "devices and fleet.per_round must be at least 1"),
        (lambda: FleetConfig(per_round=0), "devices and fleet.per_round must be at least 1"),
        (lambda: FleetConfig(devices=3, per_round=4), "per_round is 4, but .* only 3 devices"),
        (lambda: FleetConfig(group=(GroupConfig(2),)), "per_round is 5, but .* only 2 devices"),
        (
            lambda: FleetConfig(scenario="fiar"),
            "unknown fleet.scenario 'fiar'; did you mean 'fair'",
        ),
        (lambda: FleetConfig(scenario="fair", budgets=(1,)), "only one of fleet.budgets"),
        (
            lambda: FleetConfig(devices=5, budgets=(1,) * 6),
            "6 budgets cannot be dealt to 5 devices",
        ),
        (lambda: FleetConfig(devices=5, ratios=(1,) * 6), "6 budgets cannot be dealt to 5 devices"),
        (lambda: FleetConfig(ratios=(1,), budgets=(1,)), "only one of fleet.budgets, fleet.ratios"),
        (lambda: GroupConfig(1, ratio=0), "fleet.group.ratio must be a positive number, not 0"),
        (lambda: GroupConfig(1, ratio=float("inf")), "fleet.group.ratio must be a positive number"),
        (lambda: GroupConfig(0), "fleet.group.count must be at least 1, not 0"),
        (lambda: EventConfig(0, 5, join=1), "fleet.event.round counts from 1"),
        (lambda: EventConfig(1, 5), "either join = N .* or upgrade"),
        (lambda: EventConfig(1, 5, join=1, upgrade="x"), "either join = N .* or upgrade"),
        (lambda: EventConfig(1, 5, upgrade="x", count=0), "fleet.event.count must be at least 1"),
    ],
)
def test_bad_fleet_is_one_clear_sentence(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_upgrade_of_an_unknown_class_names_the_nearest() -> None:
    config = FleetConfig(budgets=(5000,), event=(EventConfig(1, 9000, upgrade="5KB"),))
    with pytest.raises(ConfigError, match="no device class '5KB'; did you mean '5kB'"):
        fleet_of(config)


def test_groups_may_have_models_of_their_own() -> None:
    groups = (GroupConfig(1, model="small"), GroupConfig(2, 500, model="large"), GroupConfig(1, 70))
    event = EventConfig(3, 900, upgrade="large", count=1)
    fleet = fleet_of(FleetConfig(per_round=1, group=groups, event=(event,)))
    devices = [fleet.device(number, 0) for number in range(4)]
    assert [device.model for device in devices] == ["small", "large", "large", None]
    assert [device.group for device in devices] == ["small", "large", "large", "70B"]
    # A device with other bytes is another device: it gets what fits it.
    assert [fleet.device(number, 2).model for number in (1, 2)] == [None, "large"]


def test_poisson_sampling_draws_each_device_by_itself() -> None:
    groups = (GroupConfig(30, 100, "often", rate=0.5), GroupConfig(70, 200, "as all"))
    fleet = fleet_of(FleetConfig(per_round=10, group=groups, sampling="poisson"))
    rounds = [[device.id for device in fleet.sample(seed, 3)] for seed in range(400)]
    assert all(numbers == sorted(set(numbers)) for numbers in rounds)
    asked = Counter(number for numbers in rounds for number in numbers)
    assert sum(asked[n] for n in range(30)) / 30 / 400 == pytest.approx(0.5, abs=0.02)
    assert sum(asked[n] for n in range(30, 100)) / 70 / 400 == pytest.approx(0.1, abs=0.01)
    # How many come differs from round to round as independent draws do.
    sizes = [len(numbers) for numbers in rounds]
    mean = sum(sizes) / 400
    spread = sum((size - mean) ** 2 for size in sizes) / 400
    assert spread == pytest.approx(30 * 0.25 + 70 * 0.09, rel=0.2)
    # Two devices of a group are independent of each other.
    both = sum({0, 1} <= set(numbers) for numbers in rounds) / 400
    assert both == pytest.approx(0.25, abs=0.07)


def test_rates_belong_to_poisson_sampling() -> None:
    with pytest.raises(ConfigError, match=r"set fleet\.sampling = 'poisson'"):
        FleetConfig(per_round=1, group=(GroupConfig(2, rate=0.5),))
    with pytest.raises(ConfigError, match="at most 1"):
        GroupConfig(2, rate=1.5)
