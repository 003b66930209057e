"""What `plan` says of a robust merge is what the run then meets."""

from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.errors import ConfigError
from sizewise.report import tables
from sizewise.runs import preview, session
from sizewise.runs.merge_outlook import outlook
from sizewise.runs.preparation import prepare

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "data": {"train_limit": 120, "test_limit": 20},
    "method": {"name": "heterofl"},
}


def config(small: int, large: int, per_round: int, **recipe: Any) -> configs.Config:
    groups = [
        {"name": "small", "count": small, "ratio": 0.5},
        {"name": "large", "count": large, "ratio": 1.0},
    ]
    fleet = {"per_round": per_round, "group": groups}
    return configs.from_dict({**TABLES, "fleet": fleet, "recipe": {"batch": 8, **recipe}})


def test_thin_entries_are_counted_by_hand() -> None:
    found = outlook(prepare(config(3, 2, 5, merge="median")))
    assert found is not None
    # 64 inputs, 8 hidden units, 10 classes; the small devices have 4 of the units.
    inner = 64 * 4 + 4 + 4 * 10 + 10
    assert found.thin == pytest.approx(1 - inner / (64 * 8 + 8 + 8 * 10 + 10))
    assert (found.needed, found.least, found.rounds) == (3, 2, 3)
    assert "49 % of what is trained is held by fewer devices than the 3" in str(found)


def test_what_is_covered_by_enough_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = config(1, 3, 4, merge="trimmed-mean")
    rows = preview.rows(chosen)
    assert rows[0]["merge"]["thin"] == 0
    tables.show_plan(rows)
    assert "all that is trained is held by 3 or more" in capsys.readouterr().out
    assert preview.rows(config(1, 3, 4))[0]["merge"] is None


def test_a_run_can_refuse_thin_entries(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raise fleet\.per_round"):  # noqa: SIM117
        with session.started(config(3, 2, 5, merge="krum", merge_thin="refuse"), tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()
    with session.started(config(1, 3, 4, merge="median", merge_thin="refuse"), tmp_path / "run"):
        pass


def test_nothing_is_thin_where_nothing_is_sent() -> None:
    chosen = configs.from_dict({**TABLES, "method": {"name": "local"}, "recipe": {"merge": "krum"}})
    found = outlook(prepare(chosen))
    assert found is not None
    assert found.thin == 0
