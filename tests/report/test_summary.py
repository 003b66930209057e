"""Tables of comparisons: exact figures from toy results."""

import pytest

from sizewise.report.summary import (
    Row,
    cells,
    columns,
    comma_separated,
    latex,
    markdown,
    summarise,
)


def result(accuracy: float, **changes: object) -> dict[str, object]:
    return {
        "accuracy": accuracy,
        "sizes": {"full": accuracy},
        "steps": 10,
        "bytes_up": 1_000_000,
        "bytes_down": 2_000_000,
        "flops": 4e12,
        "peak_bytes": {"a": 500_000, "b": None},
        "refused": [{"times": 3}, {"times": 1}],
        "seconds": 600.0,
        **changes,
    }


def test_means_and_spreads() -> None:
    row = summarise("m", {0: result(0.5), 4: result(0.7, flops=2e12)})
    assert row.seeds == (0, 4)
    assert row.mean == pytest.approx(0.6)
    assert row.spread == pytest.approx(0.1 * 2**0.5)
    assert (row.steps, row.sent, row.flops, row.peak) == (10, 3e6, 3e12, 500_000)
    assert (row.refused, row.worst, row.average) == (4, None, None)
    assert summarise("m", {0: result(0.5)}).spread is None


def test_worst_and_average_where_there_are_sizes() -> None:
    sizes = {"small": 0.3, "full": 0.5}
    row = summarise("m", {0: result(0.5, sizes=sizes)})
    assert row.worst == 0.3
    assert row.average == pytest.approx(0.4)
    assert "30.0 / 40.0" in markdown([row])


def test_markdown() -> None:
    rows = [summarise("m", {0: result(0.5), 1: result(0.7)}), Row("none", note="nobody can")]
    assert markdown(rows) == (
        "| | accuracy % | by seed | refused | steps | sent MB | TFLOP | peak MB | minutes |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        "| m | 60.0 ± 14.1 | 50.0 70.0 | 4 | 10 | 3.0 | 4 | 0.50 | 10.0 |\n"
        "| none | nobody can |  |  |  |  |  |  |  |\n"
    )


def test_units_suit_small_runs() -> None:
    row = summarise("m", {0: result(0.5, flops=3e8, seconds=5.0)})
    heads = [column.head for column in columns([row])]
    assert "MFLOP" in heads
    assert "seconds" in heads
    assert cells(row, columns([row]))[-1] == "5"


def test_latex_escapes() -> None:
    text = latex([summarise("a_b & c", {0: result(0.5), 1: result(0.5)})])
    assert r"a\_b \& c & 50.0 $\pm$ 0.0" in text
    assert r"accuracy \%" in text


def test_csv_leaves_a_gap_for_a_seed_that_failed() -> None:
    text = comma_separated([summarise("m", {1: result(0.7)})], [0, 1])
    head, line = text.splitlines()
    assert head.startswith("method,accuracy_mean,accuracy_sd,accuracy_seed_0,accuracy_seed_1,")
    assert line.startswith("m,0.7,,,0.7,")
