"""Runs with attackers, as a user starts them."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from sizewise import config as configs
from sizewise.cli import app
from sizewise.errors import ConfigError
from sizewise.fleet.attacks import Kind
from sizewise.flower.engine import FlowerEngine
from sizewise.runs import preparation, session

TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "cnn", "args": {"layers": [4, 8]}},
    "data": {"train_limit": 160, "test_limit": 40},
    "fleet": {
        "per_round": 6,
        "group": [
            {"name": "small", "count": 2, "ratio": 0.5},
            {"name": "large", "count": 4, "ratio": 1.0},
        ],
    },
    "method": {"name": "heterofl"},
    "recipe": {"batch": 16, "lr": 0.05, "merge": "median", "eval_batch": 40},
}


def config(*attacks: dict[str, Any], workers: int = 1, **recipe: Any) -> configs.Config:
    tables = {**TABLES, "fleet": {**TABLES["fleet"], "attack": list(attacks)}}
    tables["recipe"] = {**TABLES["recipe"], **recipe}
    return configs.from_dict({**tables, "engine": {"workers": workers}})


def result(path: Path, chosen: configs.Config) -> dict[str, Any]:
    with session.started(chosen, path) as federation:
        return federation.run()


def test_every_kind_changes_a_run_and_the_same_bits_come_with_any_workers(tmp_path: Path) -> None:
    honest = result(tmp_path / "honest", config(merge="mean"))["state_sha256"]
    for kind in get_args(Kind):
        attack = {"kind": kind, "count": 1, "samples": 9.0 if kind == "lie" else 1.0}
        found = result(tmp_path / kind, config(attack, merge="mean"))["state_sha256"]
        # Nobody is alone with an entry, so an attack on such entries does nothing.
        assert (found == honest) == (kind == "outer"), kind
    several = [{"kind": kind, "count": 1} for kind in ("noise", "little-is-enough", "label-flip")]
    one, two = (
        result(tmp_path / f"{workers} workers", config(*several, workers=workers))["state_sha256"]
        for workers in (1, 2)
    )
    assert one == two


def test_a_lone_large_device_is_stopped_where_thin_entries_keep_their_values(
    tmp_path: Path,
) -> None:
    groups = [
        {"name": "small", "count": 5, "ratio": 0.5},
        {"name": "large", "count": 1, "ratio": 1.0},
    ]
    tables = config({"kind": "outer", "count": 1, "group": "large"}).to_dict()
    tables["fleet"]["group"] = groups
    honest = {**tables, "fleet": {**tables["fleet"], "attack": []}}
    hashes = {}
    for thin in ("keep", "merge"):
        for name, chosen in (("honest", honest), ("outer", tables)):
            recipe = {**chosen["recipe"], "merge_thin": thin}
            found = configs.from_dict({**chosen, "recipe": recipe})
            hashes[thin, name] = result(tmp_path / f"{thin} {name}", found)["state_sha256"]
    assert hashes["keep", "outer"] == hashes["keep", "honest"]
    assert hashes["merge", "outer"] != hashes["merge", "honest"]


def test_a_claim_gets_a_larger_piece_and_samples_are_as_told(tmp_path: Path) -> None:
    lie = {"kind": "lie", "count": 1, "group": "small", "claims": "large", "samples": 3.0}
    result(tmp_path / "run", config(lie))
    text = (tmp_path / "run" / "updates.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    groups = [line["group"] for line in lines if line["round"] == 1]
    assert groups.count("large") == 5
    (liar,) = (line for line in lines if line["round"] == 1 and line["samples"] > 50)
    assert liar["device"] in (0, 1)
    assert liar["size"] == "full"


def test_labels_are_flipped_before_the_run() -> None:
    honest, poisoned = (
        preparation.prepare(config(*attacks)) for attacks in ((), [{"kind": "label-flip"}])
    )
    changed = (honest.dataset.train_labels != poisoned.dataset.train_labels).nonzero()[:, 0]
    (liar,) = (d for d in range(6) if changed[0] in honest.partition.shard(d))
    assert torch.equal(changed, honest.partition.shard(liar).sort().values)
    assert torch.equal(honest.dataset.test_labels, poisoned.dataset.test_labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["recipe.upload=int8"], "leave one of them out"),
        (["data.partition=draw", "data.samples_per_device=20"], "which no two devices share"),
        (['method={name="fedgkt", client="cnn"}'], "merges no weights"),
    ],
)
def test_runs_that_cannot_be_attacked_or_defended_are_refused(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    tables = config({"kind": "label-flip"}).to_dict()
    chosen = configs.from_dict(configs.assigned(tables, changes))
    with pytest.raises(ConfigError, match=message):
        result(tmp_path / "run", chosen)
    assert not (tmp_path / "run").exists()


def test_flower_nodes_never_attack(tmp_path: Path) -> None:
    engine = FlowerEngine.__new__(FlowerEngine)  # Refused before it is asked for anything.
    with pytest.raises(ConfigError, match="never made to attack"):  # noqa: SIM117
        with session.started(config({"kind": "noise"}), tmp_path / "run", engine=engine):
            pass
    assert not (tmp_path / "run").exists()


def test_the_command_line_says_who_attacks(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 1\n[model]\nname = "linear"\n[data]\ntrain_limit = 60\ntest_limit = 20\n'
        '[fleet]\ndevices = 3\nper_round = 3\n[[fleet.attack]]\nkind = "noise"\ncount = 1\n'
    )
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "1 device attacks (noise)" in done.stderr
