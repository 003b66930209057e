"""Tables of comparisons: exact figures from toy results."""

import csv
import io

import pytest
from rich.console import Console

from sizewise.report.summary import (
    Row,
    cells,
    columns,
    comma_separated,
    latex,
    markdown,
    summarise,
)
from sizewise.report.tables import comparison_tables


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


SIZES = {"s": 0.2, "m": 0.8, "full": 0.5}


def test_best_worst_and_mean_where_there_are_sizes() -> None:
    """NeFL's last size had 34 % where its third had 80 %, and no table told."""
    other = {"s": 0.1, "m": 0.5, "full": 0.6}
    row = summarise("m", {0: result(0.5, sizes=SIZES), 1: result(0.6, sizes=other)})
    assert row.main == "full"
    assert (row.best, row.best_size) == (pytest.approx(0.7), "m or full")
    assert (row.worst, row.worst_size) == (pytest.approx(0.15), "s")
    assert row.average == pytest.approx(0.45)


def test_every_table_says_which_size_it_means() -> None:
    plain, mean = summarise("a", {0: result(0.4)}), result(0.5, sizes={"x": 0.4, "y": 0.6})
    rows = [plain, summarise("b", {0: result(0.5, sizes=SIZES)}), summarise("c", {0: mean})]
    head, _, first, second, _, _, words = markdown(rows).splitlines()
    assert head.startswith("| | main size % | by seed | best size % | mean of sizes % | worst size")
    assert first.startswith("| a | 40.0 | 40.0 |  |  |  | 4 |")
    assert second.startswith("| b | 50.0 | 50.0 | 80.0 (m) | 50.0 | 20.0 (s) | 4 |")
    assert words == "Main sizes, the models that a method is about: a: full, b: full, c: mean."
    assert r"main size \% & by seed & best size \% & mean of sizes \%" in latex(rows)
    assert f"% {words}" in latex(rows)
    first, second, third = csv.DictReader(io.StringIO(comma_separated(rows, [0])))
    assert (second["main"], second["best"], second["best_size"]) == ("full", "0.8", "m")
    assert (second["worst"], second["worst_size"], second["average"]) == ("0.2", "s", "0.5")
    assert (first["best"], first["best_size"], third["main"]) == ("", "", "mean")


def shown(rows: list[Row], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in comparison_tables(rows, width):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_for_people_is_never_cut() -> None:
    rows = [
        summarise(name, {seed: result(0.5 + seed / 9, sizes=SIZES) for seed in range(3)})
        for name in ("fedavg", "inclusivefl")
    ]
    wide, narrow = shown(rows, 1000), shown(rows, 80)
    assert (wide.count("inclusivefl"), narrow.count("inclusivefl")) == (1, 2)
    assert max(map(len, narrow.splitlines())) <= 80
    for column in columns(rows):
        for row in rows:
            assert column.cell(row) in wide
            # Long cells go on in the next line; no figure is broken.
            assert set(column.cell(row).split()) <= set(narrow.split()), column.head
    assert "…" not in narrow


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


SERVED = {"score": 0.6, "devices": 20, "mean": 0.5, "worst_tenth": 0.1, "deviation": 0.2}


def test_figures_of_devices_where_they_validate() -> None:
    other = {**SERVED, "mean": 0.7, "worst_tenth": 0.2}
    row = summarise("m", {0: result(0.5, validation=SERVED), 1: result(0.6, validation=other)})
    assert (row.devices, row.worst_tenth) == (pytest.approx(0.6), pytest.approx(0.15))
    few = summarise("own", {0: result(0.5, validation={**SERVED, "devices": 4})})
    # STS-B has scores, which are neither right nor wrong.
    scores = summarise("scores", {0: result(0.5, validation={"score": 0.6})})
    text = markdown([row, few, scores])
    assert "| devices % | worst 10 % of devices |" in text
    assert "| 60.0 | 15.0 |" in text
    assert "| 50.0 (4 devices) | 10.0 |" in text
    assert "Devices: each with the model that it runs, on its own validation samples." in text
    table = list(csv.DictReader(io.StringIO(comma_separated([row, few, scores], [0, 1]))))
    assert [entry["served"] for entry in table] == ["20.0", "4.0", ""]


@pytest.mark.parametrize("validation", [None, {}])
def test_nothing_new_where_they_do_not(validation: object) -> None:
    before, after = result(0.5), result(0.5, validation=validation)
    rows = [summarise("m", {0: one}) for one in (before, after)]
    assert rows[0] == rows[1]
    assert "device" not in markdown(rows)
    assert "served" not in comma_separated(rows, [0])
