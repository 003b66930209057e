"""A run with adapters on Flower: the same bits, no base on the wire, one base everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from sizewise.config import Config
from sizewise.errors import EngineError
from sizewise.families.lora.adapters import DOWN, UP

pytest.importorskip("flwr")
pytest.importorskip("peft")

from dataclasses import replace

from fake_grid import FakeGrid
from flwr.app import RecordDict

from sizewise.common.structure import plain
from sizewise.flower import wire
from sizewise.flower.identity import weights_hash
from sizewise.flower.server import serve


def test_the_same_bits_on_flower(adapted: tuple[Config, Path], tmp_path: Path) -> None:
    config, path = adapted
    grid = FakeGrid({"partition-id": n} for n in range(3))
    seen: list[str] = []

    def look(message: Any, reply: Any) -> Any:
        for content in (message.content, reply.content):
            for name in {"tensors", "sample_payload"} & set(content):
                seen.extend(wire.unpack(content[name]))
        return reply

    grid.tamper = look
    result = serve(grid, config, tmp_path / "run", poll=0)
    expected = json.loads((path / "result.json").read_text())
    assert result["state_sha256"] == expected["state_sha256"]
    assert result["bytes_down"] == expected["bytes_down"]
    assert seen
    assert all(name.endswith((DOWN, UP)) for name in seen)


@pytest.mark.parametrize(("hash_", "said"), [("ab" * 32, "abababababab"), ("", "(there are none)")])
def test_a_node_with_another_base_is_refused(
    adapted: tuple[Config, Path], hash_: str, said: str, tmp_path: Path
) -> None:
    config, _ = adapted
    ours = weights_hash(str(config.model.weights))
    assert len(ours) == 64
    grid = FakeGrid({"partition-id": n} for n in range(3))

    def other(message: Any, reply: Any) -> Any:
        if "announce" in message.metadata.message_type and message.metadata.dst_node_id == 102:
            told = wire.read_as(wire.Announcement, reply.content, "announcement")
            assert told.software.weights == ours
            told = replace(told, software=replace(told.software, weights=hash_))
            reply.content = RecordDict({"announcement": wire.write(plain(told))})
        return reply

    grid.tamper = other
    flower = replace(config.engine.flower, wait=0.1)
    config = replace(config, engine=replace(config.engine, flower=flower))
    with pytest.raises(EngineError, match="put the same file where") as error:
        serve(grid, config, tmp_path / "run", poll=0.01)
    assert f"the hash {said}, and the server's have {ours[:12]}" in str(error.value)
    assert not (tmp_path / "run").exists()
