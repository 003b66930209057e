import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sizewise.config import Config, from_dict
from sizewise.errors import CheckpointError, ConfigError
from sizewise.exchange import checkpoint
from sizewise.exchange.plan import Plan, Submodel, Update
from sizewise.exchange.state import State
from sizewise.runs.folder import RunFolder, Totals

CONFIG = from_dict({"rounds": 5, "method": {"name": "fedprox"}, "fleet": {"budgets": ["2kB"]}})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder.create(tmp_path / "run", CONFIG)
    yield made
    made.release()


def totals(rounds: int) -> Totals:
    refused = ({"group": "2kB", "reason": "x", "times": 1, "devices": [3]},)
    return Totals(rounds, 10, 20, 30, 0.5, {"2kB": 7}, refused, 0.25, {"full": 0.25})


def state(rounds: int) -> State:
    tensors = {"a/b.w": torch.full((2,), float(rounds)), "n": torch.tensor(rounds)}
    return State(tensors, {"first/a/b.w": torch.ones(2)}, {"note": [rounds]})


def do_round(folder: RunFolder, rounds: int) -> None:
    folder.log([{"round": rounds, "device": d} for d in range(2)], {"round": rounds})
    folder.save(state(rounds), totals(rounds))
    folder.wait()


def lines(folder: RunFolder, name: str) -> list[int]:
    text = (folder.path / name).read_text()
    return [json.loads(line)["round"] for line in text.splitlines()]


def remembering(device: int, rounds: int) -> Update:
    plan = Plan(device, rounds - 1, "any", Submodel(), ())
    memory = {"w": torch.tensor([float(rounds)])}
    return Update(plan, {}, samples=1, steps=1, loss=0.0, device_state=memory)


def test_config_is_in_the_folder_complete(folder: RunFolder) -> None:
    folder.release()
    again, config = RunFolder.open(folder.path)
    again.release()
    assert config == CONFIG
    assert "momentum = 0.9" in (folder.path / "config.toml").read_text()


def test_round_comes_back(folder: RunFolder) -> None:
    do_round(folder, 1)
    restored = folder.restore()
    assert restored is not None
    found, so_far = restored
    assert so_far == totals(1)
    expected = state(1)
    for mine, theirs in (
        (found.tensors, expected.tensors),
        (found.server_state, expected.server_state),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert found.metadata == {"note": [1]}
    assert dict(found.devices) == {}


def test_a_round_of_an_older_version_is_refused(folder: RunFolder) -> None:
    path = checkpoint.path_of(folder.checkpoints, 1)
    checkpoint.write_tensors(path, {"memory/w": torch.ones(1)}, {"extras": {}, "devices": {}})
    with pytest.raises(CheckpointError, match="was written by an older sizewise"):
        folder.newest()


def test_totals_without_accuracy_come_back(folder: RunFolder) -> None:
    folder.log([], {"round": 1})
    folder.save(state(1), Totals(rounds=1))
    restored = folder.restore()
    assert restored is not None
    assert restored[1] == Totals(rounds=1)


def test_lines_of_a_round_that_never_finished_are_cut_off(folder: RunFolder) -> None:
    do_round(folder, 1)
    do_round(folder, 2)
    folder.log([{"round": 3}], {"round": 3})
    with (folder.path / "updates.jsonl").open("a") as file:
        file.write('{"round": 4, "dev')
    folder.restore()
    assert lines(folder, "updates.jsonl") == [1, 1, 2, 2]
    assert lines(folder, "history.jsonl") == [1, 2]


def test_before_the_first_checkpoint_the_logs_start_over(folder: RunFolder) -> None:
    folder.log([{"round": 1}], {"round": 1})
    assert folder.restore() is None
    assert not (folder.path / "history.jsonl").exists()
    assert not (folder.path / "updates.jsonl").exists()
    do_round(folder, 1)
    assert lines(folder, "history.jsonl") == [1]


def test_damaged_checkpoint_is_named_and_the_one_before_still_works(folder: RunFolder) -> None:
    for rounds in (1, 2, 3):
        do_round(folder, rounds)
    newest = checkpoint.path_of(folder.checkpoints, 3)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"round-000003.*delete it to go on from the round"):
        folder.restore()
    assert lines(folder, "history.jsonl") == [1, 2, 3]
    newest.unlink()
    restored = folder.restore()
    assert restored is not None
    assert restored[1].rounds == 2
    assert lines(folder, "history.jsonl") == [1, 2]


@pytest.mark.parametrize("name", ["updates.jsonl", "history.jsonl"])
@pytest.mark.parametrize("missing", [True, False])
def test_log_shorter_than_its_checkpoint_is_an_error(
    folder: RunFolder, name: str, missing: bool
) -> None:
    do_round(folder, 1)
    if missing:
        (folder.path / name).unlink()
    else:
        (folder.path / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=rf"{name}.* missing or shorter"):
        folder.restore()


def test_devices_remember_their_newest_file(folder: RunFolder) -> None:
    now = state(1)
    for rounds, devices in ((1, (3, 4)), (2, (4,)), (3, ())):
        written = {device: folder.remember(remembering(device, rounds)) for device in devices}
        now = folder.remembering(now, written)
        folder.log([], {"round": rounds})
        folder.save(now, Totals(rounds=rounds))
        folder.wait()
    restored = folder.restore()
    assert restored is not None
    assert {n: memory["w"].item() for n, memory in restored[0].devices.items()} == {3: 1, 4: 2}


def test_round_that_never_finished_leaves_device_memories_alone(folder: RunFolder) -> None:
    now = folder.remembering(state(1), {3: folder.remember(remembering(3, 1))})
    folder.log([], {"round": 1})
    folder.save(now, Totals(rounds=1))
    folder.remember(remembering(3, 2))
    restored = folder.restore()
    assert restored is not None
    assert restored[0].devices[3]["w"].tolist() == [1]


def test_device_files_do_not_pile_up_and_the_round_before_keeps_its_own(folder: RunFolder) -> None:
    now = state(1)
    for rounds in range(1, 6):
        now = folder.remembering(now, {3: folder.remember(remembering(3, rounds))})
        folder.log([], {"round": rounds})
        folder.save(now, Totals(rounds=rounds))
        folder.wait()
    assert len(list(folder.devices.iterdir())) == 2
    checkpoint.path_of(folder.checkpoints, 5).unlink()
    restored = folder.restore()
    assert restored is not None
    assert restored[0].devices[3]["w"].tolist() == [4]


def test_device_files_do_not_pile_up_where_only_some_rounds_are_saved(folder: RunFolder) -> None:
    now = state(1)
    for rounds in range(1, 7):
        now = folder.remembering(now, {3: folder.remember(remembering(3, rounds))})
        folder.log([], {"round": rounds})
        if rounds % 2 == 0:
            folder.save(now, Totals(rounds=rounds))
            folder.wait()
    # The checkpoints of rounds 4 and 6 name theirs; 5 goes with the next one.
    assert sorted(path.stem[-1] for path in folder.devices.iterdir()) == ["4", "5", "6"]


def test_end_of_a_run_is_written(folder: RunFolder) -> None:
    folder.finish(state(5), {"rounds": 5, "sizes": {"full": 0.5}})
    tensors, facts = checkpoint.read_tensors(folder.path / "final.safetensors")
    assert tensors["a/b.w"].tolist() == [5, 5]
    assert facts == {"rounds": 5, "sizes": {"full": 0.5}}
    assert json.loads((folder.path / "result.json").read_text())["rounds"] == 5


def test_folder_is_held_by_one_at_a_time(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="is in use by another process"):
        RunFolder.open(folder.path)
    folder.release()
    again, _ = RunFolder.open(folder.path)
    again.release()


def test_new_run_needs_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(ConfigError, match="exists and is not empty; choose another --out"):
            RunFolder.create(path, Config())
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(tmp_path / "x" / "y", Config())


def test_empty_folder_may_exist(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, Config())
    assert (tmp_path / "config.toml").is_file()
    folder.release()


def test_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="is not a run folder"):
            RunFolder.open(path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_after_a_failure(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_round(folder, 1)

    def full(*content: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(folder, "_append", full)
    folder.log([{"round": 2}], {"round": 2})
    folder.save(state(2), totals(2))
    with pytest.raises(OSError, match="the disk is full"):
        folder.wait()
    assert not checkpoint.path_of(folder.checkpoints, 2).exists()
    folder.release()
