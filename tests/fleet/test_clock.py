"""The simulated clock: seconds from a device's own FLOPs and bytes, and rounds that end."""

import json
from pathlib import Path

import pytest

from sizewise import config as configs
from sizewise.errors import ConfigError, UpdateRefused
from sizewise.fleet import clock
from sizewise.fleet.clock import Clock
from sizewise.fleet.devices import Device, FleetConfig, GroupConfig
from sizewise.fleet.making import make_fleet
from sizewise.fleet.profiles import PROFILES, REACHED
from sizewise.runs import session


def test_seconds_of_an_update() -> None:
    device = Device(0, "a", speed=100.0, bandwidth=10.0)
    assert clock.seconds(device, bytes_down=20, flops=500, bytes_up=30) == 2 + 5 + 3
    assert clock.seconds(Device(0, "a", speed=100.0), 20, 500, 30) == 5
    assert clock.seconds(Device(0, "a", bandwidth=10.0), 20, 500, 30) == 5
    assert clock.seconds(Device(0, "a"), 20, 500, 30) is None


def test_rounds_end_with_the_slowest_or_at_the_deadline() -> None:
    assert Clock().round([1.0, 7.0, None]) == 7
    assert Clock(5.0).round([1.0, 7.0]) == 5
    assert Clock(5.0).round([1.0, 2.0]) == 2
    assert Clock(5.0).round([None]) is None
    Clock(5.0).check(5.0)
    Clock(5.0).check(None)
    Clock().check(1e9)
    with pytest.raises(UpdateRefused, match=r"7\.25 s, and the round ended after 5 s"):
        Clock(5.0).check(7.25)


def test_profiles_give_speed_and_bandwidth() -> None:
    fleet = make_fleet(FleetConfig(4, 2, (1000, 2000), profiles=("pi-4", "desktop")), lambda r: 0)
    slow, fast = fleet.device(0, 0), fleet.device(3, 0)
    assert slow.speed == REACHED * 4 * 1.5e9 * 8
    assert (fast.speed, fast.bandwidth) == (PROFILES["desktop"].speed, 125e6)
    one = make_fleet(FleetConfig(4, 2, (1000, 2000), profiles=("pi-4",)), lambda r: 0)
    assert {one.device(n, 0).speed for n in range(4)} == {slow.speed}
    own = GroupConfig(3, 1000, speed=7.0, profile="pi-4")
    mixed = make_fleet(FleetConfig(group=(own,), per_round=1), lambda r: 0).device(0, 0)
    assert (mixed.speed, mixed.bandwidth) == (7.0, PROFILES["pi-4"].bandwidth)


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"profiles": ["pi-44"]}, "unknown device profile 'pi-44'; did you mean 'pi-4'"),
        ({"budgets": [1, 2, 3], "profiles": ["pi-4", "pi-5"]}, "one for each of the 3 budgets"),
        ({"deadline": 0}, "fleet.deadline must be positive"),
        ({"group": [{"count": 9, "speed": -1}]}, "fleet.group.speed must be a positive"),
        ({"group": [{"count": 9}], "profiles": ["pi-4"]}, "give each fleet.group its profile"),
    ],
)
def test_bad_clocks_are_one_sentence(fleet: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_fleet(configs.from_dict({"fleet": fleet}).fleet, lambda ratio: 0)
    assert message in str(caught.value)


TABLES = {
    "rounds": 2,
    "model": {"name": "linear"},
    "data": {"train_limit": 200, "test_limit": 50},
}


def lines(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_late_updates_are_refused_and_the_round_ends_on_time(tmp_path: Path) -> None:
    group = [
        {"count": 3, "name": "slow", "speed": 1e3},
        {"count": 3, "name": "fast", "speed": 1e9},
    ]
    fleet = {"group": group, "per_round": 6, "deadline": 2.0}
    config = configs.from_dict({**TABLES, "fleet": fleet})
    with session.started(config, tmp_path / "run") as federation:
        result = federation.run()
    assert {refusal["group"] for refusal in result["refused"]} == {"slow"}
    assert "the round ended after 2 s" in result["refused"][0]["reason"]
    for line in lines(tmp_path / "run", "updates.jsonl"):
        if line["group"] == "fast":
            assert line["device_seconds"] == line["flops"] / 1e9  # type: ignore[operator]
            assert line["refused"] is None
    assert [line["device_seconds"] for line in lines(tmp_path / "run", "history.jsonl")] == [2, 2]


def test_without_rates_there_is_no_clock(tmp_path: Path) -> None:
    config = configs.from_dict({**TABLES, "rounds": 1, "fleet": {"devices": 4, "per_round": 2}})
    with session.started(config, tmp_path / "run") as federation:
        federation.run()
    for name in ("updates.jsonl", "history.jsonl"):
        assert all("device_seconds" not in line for line in lines(tmp_path / "run", name))
