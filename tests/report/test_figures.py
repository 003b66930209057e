import pytest

from sizewise.errors import ConfigError
from sizewise.report.figures import PARTS, draw_plan

BYTES = dict.fromkeys(PARTS, 1_000_000)
ROWS = [
    {"group": "2MB", "size": "full", "budget": 2_000_000, "bytes": BYTES, "refused": "too small"},
    {"group": "9MB", "size": "full", "budget": 9_000_000, "bytes": BYTES, "refused": None},
    {"group": "any", "size": "full", "budget": None, "bytes": BYTES, "refused": None},
]


def test_a_plan_is_drawn_with_its_classes_and_parts(tmp_path, monkeypatch):
    import matplotlib

    # As text, not as outlines, so that the words can be looked for.
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    draw_plan(ROWS, tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    for word in ("2MB", "9MB", "any", "cannot take part", "optimizer state", "activations"):
        assert word in drawn


def test_the_same_plan_gives_the_same_file(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.hashsalt", "sizewise")
    for name in ("a.svg", "b.svg"):
        draw_plan(ROWS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("name", ["plan.doc", "missing/plan.svg"])
def test_a_file_that_cannot_be_written_is_one_sentence(name, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        draw_plan(ROWS, tmp_path / name)
    assert "\n" not in str(caught.value)
