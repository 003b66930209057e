"""`sizewise plan` says beforehand what a run turns out to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.report import tables
from sizewise.runs import preview, session

CONFIG: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "cnn", "args": {"layers": [4, 8]}},
    "data": {"train_limit": 300, "test_limit": 50},
    "fleet": {"devices": 6, "per_round": 6, "budgets": ["10kB", "1MB", "2MB"]},
}


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"batch": 20, "drop_last": True, "epochs": 3},
        {"batch": 49, "momentum": 0.0},  # of 50 samples the last one is alone, and passed by
        {"batch": 8, "epochs": 2, "max_steps": 9, "proximal": 0.1, "norm": "tracked"},
    ],
)
def test_the_run_does_what_the_plan_says(recipe: dict[str, Any], tmp_path: Path) -> None:
    config = configs.from_dict({**CONFIG, "recipe": recipe})
    rows = {row["group"]: row for row in preview.rows(config)}
    with session.started(config, tmp_path / "run") as federation:
        result = federation.run()
    assert rows.keys() == result["budget_bytes"].keys()
    text = (tmp_path / "run" / "updates.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 6
    for line in lines:
        row = rows[line["group"]]
        assert row["refused"] == line["refused"]
        if row["refused"] is None:
            for key in ("size", "budget", "predicted", "bytes_up", "bytes_down", "steps", "flops"):
                assert row[key] == line[key], key
            # The first step finds no momentum yet, and a shard may have no second whole batch.
            assert line["peak_bytes"] <= row["predicted"]
            assert max(stage["bytes"]["peak"] for stage in row["stages"]) == row["predicted"]
    assert sum(row["devices"] for row in rows.values()) == 6


def test_a_class_that_cannot_take_part_is_told_what_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = preview.rows(configs.from_dict(CONFIG))
    assert rows[0]["budget"] == 10_000 < rows[0]["predicted"] == rows[1]["predicted"]
    assert f"give it at least {rows[0]['predicted']:,} bytes" in rows[0]["refused"]
    assert json.loads(json.dumps(rows)) == rows
    tables.show_plan(rows)
    shown = capsys.readouterr().out
    assert rows[0]["refused"] in shown
    assert "1MB" in shown


def test_devices_that_come_later_have_rows_too() -> None:
    fleet = {
        "devices": 4,
        "per_round": 2,
        "scenario": "fair",
        "event": [{"round": 3, "join": 2, "memory": "3MB"}],
    }
    method = {"name": "fedavg", "width": 0.5}
    config = {**CONFIG, "model": {"name": "cnn"}, "fleet": fleet, "method": method}
    rows = preview.rows(configs.from_dict(config))
    assert [(row["group"], row["devices"]) for row in rows] == [
        ("1/6", 1),
        ("1/3", 1),
        ("1/2", 1),
        ("1", 1),
        ("3MB", 2),
    ]
    # Shares are of what the paper counts, so they are proportional and more than what is needed.
    assert rows[2]["budget"] == pytest.approx(rows[3]["budget"] / 2, abs=1)
    assert rows[2]["budget"] > rows[2]["predicted"]
    assert [row["refused"] is None for row in rows] == [False, False, True, True, True]


def test_a_ratio_is_the_cost_of_a_network_of_that_width() -> None:
    fleet = {"devices": 2, "per_round": 2, "ratios": [0.25, 0.5]}
    method = {"name": "fedavg", "width": 0.5}
    config = {**CONFIG, "model": {"name": "cnn"}, "fleet": fleet, "method": method}
    narrow, half = preview.rows(configs.from_dict(config))
    assert (narrow["group"], half["group"]) == ("0.25 model", "0.5 model")
    assert half["budget"] == half["predicted"]
    assert narrow["refused"]
    assert narrow["predicted"] == half["predicted"]


def test_the_blocks_that_a_method_takes_a_model_apart_into_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = {"name": "in_place_cases:Stages"}
    said = "taken apart into 4 blocks, stages.0.blocks.0 to stages.1.blocks.1; if they are others"
    rows = preview.rows(
        configs.from_dict({**CONFIG, "model": model, "method": {"name": "inclusivefl"}})
    )
    tables.show_plan(rows)
    assert said in capsys.readouterr().out
    named = {**model, "anatomy": {"blocks": "stages"}}
    rows = preview.rows(
        configs.from_dict({**CONFIG, "model": named, "method": {"name": "inclusivefl"}})
    )
    assert rows[0]["blocks"] == "taken apart into 2 blocks, stages.0 to stages.1"
    assert preview.rows(configs.from_dict({**CONFIG, "model": model}))[0]["blocks"] is None
