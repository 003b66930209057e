import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.exchange.checkpoint import DeviceFiles, read_tensors, write_bytes, write_tensors

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "n": torch.tensor(7),
    "none": torch.zeros(0, 2),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def test_tensors_and_facts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    facts = {"round": 3, "names": ["x"], "text": "é\n"}
    write_tensors(path, TENSORS, facts)
    tensors, found = read_tensors(path)
    assert found == facts
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


def test_views_and_parameters_are_written_as_they_look(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    write_tensors(tmp_path / "a", {"t": matrix.t(), "p": torch.nn.Parameter(matrix[:, 1])}, {})
    tensors, _ = read_tensors(tmp_path / "a")
    assert tensors["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensors["p"].tolist() == [1, 4]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "rename")])
def test_crash_while_writing_leaves_the_old_file(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(KeyboardInterrupt):
            write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    write_bytes(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_process_killed_in_mid_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: os._exit(9)  # type: ignore[assignment]
        write_bytes(path, b"new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert path.read_bytes() == b"old"


def test_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noting_sync(descriptor: int) -> None:
        events.append("sync")
        sync(descriptor)

    def noting_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    write_bytes(tmp_path / "a", b"x")
    assert events == ["sync", "rename to a", "sync"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("checkpoint") / "a.safetensors"
    write_tensors(path, {"w": torch.arange(4.0)}, {"rounds": 3, "devices": {"1": "x"}})
    return path, path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_flipped_bit_anywhere_is_noticed(healthy: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = healthy
    place = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tensors(path)


@pytest.mark.parametrize("cut", [0, 5, -1])
def test_truncated_file_is_noticed(healthy: tuple[Path, bytes], cut: int) -> None:
    path, content = healthy
    path.write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tensors(path)


def test_missing_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="delete it to go on from the round before") as caught:
        read_tensors(tmp_path / "nothing")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tensors(tmp_path / "a")
    save_file({"w": torch.ones(1)}, tmp_path / "b", metadata={"sizewise": json.dumps({})})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tensors(tmp_path / "b")


def test_newest_checkpoint_by_round_and_the_last_two_stay(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for rounds in (9, 10, 2, 100):
        write_tensors(checkpoint.path_of(tmp_path, rounds), {}, {})
    newest = checkpoint.newest(tmp_path)
    assert newest == checkpoint.path_of(tmp_path, 100)
    checkpoint.prune(tmp_path)
    kept = {checkpoint.path_of(tmp_path, rounds) for rounds in (10, 100)}
    assert set(tmp_path.iterdir()) == kept


def test_half_written_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    write_tensors(checkpoint.path_of(tmp_path, 1), {}, {})
    (tmp_path / ".round-000002.safetensors.tmp").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) == checkpoint.path_of(tmp_path, 1)


def test_device_files_are_read_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "d"
    files = DeviceFiles({4: str(path)})
    assert (list(files), len(files), 4 in files, 5 in files) == ([4], 1, True, False)
    write_tensors(path, {"w": torch.ones(2)}, {})
    assert files[4]["w"].tolist() == [1, 1]
    assert files.get(5, {}) == {}
    path.unlink()
    with pytest.raises(CheckpointError):
        files[4]
