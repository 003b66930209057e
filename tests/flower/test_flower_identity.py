"""A node that runs something else, or claims the number of another, is refused by name."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sizewise import __version__
from sizewise import config as configs
from sizewise.common.structure import plain
from sizewise.errors import ConfigError, EngineError

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import Message, RecordDict

from sizewise.flower import wire
from sizewise.flower.identity import Software, mismatch, read_keys, software, source_hash
from sizewise.flower.server import serve

HERE = software("cnn")
TABLES: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "linear"},
    "data": {"train_limit": 60, "test_limit": 20},
    "fleet": {"devices": 2, "per_round": 2},
    "recipe": {"batch": 8},
}


def config_of(**policy: Any) -> configs.Config:
    return configs.from_dict({**TABLES, "engine": {"flower": {"wait": 0.2, **policy}}})


def saying(**changes: str) -> Any:
    """Return what makes node 102 say something else about what it runs."""

    def tamper(message: Message, reply: Message) -> Message:
        if "announce" not in message.metadata.message_type or message.metadata.dst_node_id != 102:
            return reply
        said = wire.read_as(wire.Announcement, reply.content, "announcement")
        said = replace(said, software=replace(said.software, **changes))
        reply.content = RecordDict({"announcement": wire.write(plain(said))})
        return reply

    return tamper


def test_what_is_the_same() -> None:
    assert HERE.sizewise == __version__
    assert len(HERE.model) == 64
    assert mismatch(HERE, HERE) is None
    assert software("preresnet8") == HERE, "they are in one package"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizewise": "0.0.9"}, f"runs sizewise 0.0.9, and the server runs sizewise {__version__}"),
        ({"torch": "1.5.0"}, f"it runs torch 1.5.0, and the server runs torch {HERE.torch}"),
        ({"torch": ""}, "torch of an unknown version"),
        ({"model": "ab" * 32}, "hash abababababab, and the server's has " + HERE.model[:12]),
        ({"model": ""}, "the hash (there is none)"),
    ],
)
def test_a_node_that_runs_something_else_is_refused(
    changes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    grid = FakeGrid({"partition-id": n} for n in range(2))
    grid.tamper = saying(**changes)
    with pytest.raises(EngineError) as error:
        serve(grid, config_of(), tmp_path / "run", poll=0.01)
    assert f"node 102: device 1: {'it' if reason[0] == 'i' else ''}" in str(error.value)
    assert reason in str(error.value)
    serve(grid, config_of(nodes=1), tmp_path / "run", poll=0.01)
    text = (tmp_path / "run/nodes.jsonl").read_text()
    odd = [json.loads(line) for line in text.splitlines() if "unusable" in line]
    assert [line["node"] for line in odd] == ["102"]
    assert reason in odd[0]["reason"]


def test_the_hash_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "own_model_of_a_test.py"
    path.write_text("def make():\n    pass\n")
    first = software("own_model_of_a_test:make")
    assert first.model == source_hash("own_model_of_a_test")
    path.write_bytes(b"def make():\r\n    pass\r\n")
    assert software("own_model_of_a_test:make") == first
    path.write_text("def make():\n    return 1\n")
    assert "install the same code" in str(mismatch(software("own_model_of_a_test:make"), first))
    assert source_hash("nowhere.to.be.found") == ""
    assert "own_model_of_a_test" not in sys.modules, "it is read, not run"


def new_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("needs ssh-keygen")


def test_a_stolen_number_is_refused_though_the_thief_came_first(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for number in range(2):
        new_key(keys / f"{number}")
    known = read_keys(str(keys))
    assert known is not None
    # Node 101 has the key of device 0 and says that it is device 1; the real one comes later.
    grid = FakeGrid([{"partition-id": 1}, {"partition-id": 0}, {"partition-id": 1}])
    grid.keys = {101: known[0], 102: known[0], 103: known[1]}
    result = serve(grid, config_of(keys=str(keys)), tmp_path / "run", poll=0.01)
    assert result["refused"] == []
    noted = [json.loads(line) for line in (tmp_path / "run/nodes.jsonl").read_text().splitlines()]
    told = {line["node"]: line for line in noted}
    assert told["101"]["event"] == "unusable"
    assert told["101"]["reason"].startswith("it says that it is device 1, whose key is another")
    assert (told["102"]["device"], told["103"]["device"]) == (0, 1)


def test_keys_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert read_keys(None) is None
    with pytest.raises(ConfigError, match=r"no file ends in \.pub"):
        read_keys(str(tmp_path))
    (tmp_path / "1.pub").write_text("nonsense")
    with pytest.raises(ConfigError, match="holds no public key"):
        read_keys(str(tmp_path))
    (tmp_path / "1.pub").unlink()
    new_key(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"expected names such as 3\.pub"):
        read_keys(str(tmp_path))


def test_a_node_of_an_older_version_says_nothing() -> None:
    assert "of an unknown version" in str(mismatch(Software(), HERE))
