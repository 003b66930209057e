"""The report: complete, self-contained, and right in a browser."""

import base64
import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest

import browser
from commands import assert_one_sentence, sizewise
from sizewise import config as configs
from sizewise.report import benefit, differences, page, records
from sizewise.report.drawing import Dot
from sizewise.report.records import Run
from sizewise.report.summary import Row
from sizewise.runs import session
from sizewise.runs.cuts import Cuts

TABLES = {
    "rounds": 3,
    "model": {"name": "cnn", "args": {"layers": [8, 8, 16]}},
    "data": {
        "train_limit": 300,
        "test_limit": 100,
        "partition": "capped-dirichlet",
        "min_samples": 5,
        "alpha": 0.5,
        "validation": 0.2,
    },
    "fleet": {
        "devices": 8,
        "per_round": 6,
        "budgets": ["20kB", "200kB", "2MB"],
        "profiles": ["pi-zero-2w", "pi-4", "desktop"],
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four runs: two methods with two seeds; some devices are refused."""
    home = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "heterofl"):
        for seed in (0, 1):
            config = configs.from_dict({**TABLES, "method": {"name": method}, "seed": seed})
            with session.started(config, home / f"{method}-{seed}") as federation:
                federation.run()
    return sorted(home.iterdir())


@pytest.fixture(scope="module")
def runs(folders: list[Path]) -> list[Run]:
    return records.read(folders)


@pytest.fixture(scope="module")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    answer = sizewise("report", *folders, "--out", out)
    assert (answer.code, answer.out.strip()) == (0, str(out)), answer.err
    return out


class Links(HTMLParser):
    """All that a page could ask for, and what it lets people save."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.saved: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            if key in values and not values[key].startswith("data:"):
                self.asked.append(values[key])
        if "download" in values:
            data = values["href"].partition("base64,")[2]
            self.saved[values["download"]] = base64.b64decode(data).decode()


def links(path: Path) -> Links:
    parser = Links()
    parser.feed(path.read_text())
    return parser


def test_the_page_refers_to_nothing_outside(report: Path) -> None:
    assert links(report).asked == []
    assert "@import" not in report.read_text()
    assert not re.search(r"url\(", report.read_text())


CHARTS = [
    *("accuracy-round", "accuracy-sent", "accuracy-flops", "accuracy-seconds"),
    *(
        "accuracy-device-seconds",
        "training-loss",
        "accuracy-by-size",
        "devices",
        "memory",
        "pieces",
        "participation",
        "labels",
    ),
]


def test_every_chart_has_its_data(report: Path, runs: list[Run]) -> None:
    saved = links(report).saved
    assert sorted(saved) == sorted(
        [f"{name}.{end}" for name in CHARTS for end in ("csv", "svg")]
        + ["table.csv", "table.md", "table.tex"]
    )
    tables = {n: list(csv.DictReader(io.StringIO(t))) for n, t in saved.items() if "csv" in n}
    assert all(tables.values())
    last = [row for row in tables["accuracy-round.csv"] if row["round"] == "3"]
    assert [float(row["accuracy"]) for row in last] == [run.totals()["accuracy"] for run in runs]
    sent = tables["accuracy-sent.csv"][-1]["sent"]
    assert float(sent) == runs[-1].result["bytes_up"] + runs[-1].result["bytes_down"]
    memory = {(row["row"], row["group"]): row for row in tables["memory.csv"]}
    assert memory["fedavg", "20kB"]["refused"] == "True"
    assert int(memory["heterofl", "2MB"]["metered"]) == max(
        run.result["peak_bytes"]["2MB"] or 0 for run in runs if run.row == "heterofl"
    )
    asked = sum(int(row["trained"]) + int(row["refused"]) for row in tables["participation.csv"])
    assert asked == 2 * 3 * 6, "one seed of each method, three rounds, six devices"
    assert sum(int(row["samples"]) for row in tables["labels.csv"]) == 240, "60 are to validate on"
    served = [run.result["validation"]["devices"] for run in runs]
    assert len(tables["devices.csv"]) == sum(served) == 32
    scores = [float(row["accuracy"]) for row in tables["devices.csv"][:8]]
    assert sum(scores) / 8 == pytest.approx(runs[0].result["validation"]["mean"])
    widths = {(r["group"], r["part"]): float(r["width"]) for r in tables["pieces.csv"]}
    assert widths["200kB", "block 1"] < widths["2MB", "block 1"] == 1


def test_the_training_loss_is_that_of_the_history(report: Path, runs: list[Run]) -> None:
    rows = list(csv.DictReader(io.StringIO(links(report).saved["training-loss.csv"])))
    first = [float(row["loss"]) for row in rows if (row["row"], row["seed"]) == ("fedavg", "0")]
    assert first == [line["train_loss"] for line in runs[0].history if line["train_loss"]]


def test_configs_that_differ_are_put_beside_each_other(report: Path, runs: list[Run]) -> None:
    found = {one.key: one.values for one in differences.of_configs(runs)}
    assert found == {"method.name": ("fedavg", "heterofl")}
    assert "<td>heterofl</td></tr>" in report.read_text()
    changed = {**runs[1].config, "recipe": {**runs[1].config["recipe"], "lr": 0.5, "clip": 1.0}}
    method = {**runs[1].config["method"], "width": 0.5, "nobody_else_has": 1}
    other = replace(runs[1], row="other", config={**changed, "method": method})
    found = {one.key: one.values for one in differences.of_configs([runs[0], other])}
    assert found == {
        "seed": ("0", "1"),
        "method.width": ("1.0", "0.5"),
        "recipe.lr": (str(runs[0].config["recipe"]["lr"]), "0.5"),
        "recipe.clip": ("", "1.0"),
    }


def test_machines_that_differ_are_named(runs: list[Run]) -> None:
    assert differences.of_environments(runs) == []
    elsewhere = replace(runs[1], environment={**runs[1].environment, "cpu": "AVX2"})
    (found,) = differences.of_environments([runs[0], elsewhere])
    assert (found.key, found.values[1]) == ("cpu", "AVX2")
    assert "made on different machines" in page.html([runs[0], elsewhere])


def test_levers_and_what_stays_whole_are_said(report: Path, runs: list[Run]) -> None:
    assert "None were used: every step is a plain one." in report.read_text()
    plan = [{**row, "levers": "parts of 8", "more_flops": 1.25} for row in runs[2].plan]
    whole = tuple(f"layer {number}, as it says" for number in range(5))
    text = page.html([replace(runs[2], plan=plan, cuts=Cuts(0.5, whole))])
    assert '<td class="words">parts of 8</td>' in text
    assert "<td>1.25</td>" in text
    assert "and 2 more</dd>" in text
    assert "All 5 parts that stay whole under heterofl" in text
    assert "<dd>layer 4, as it says</dd>" in text


def test_every_device_has_a_ring(runs: list[Run]) -> None:
    served = runs[0].served
    titles = [dot.title for dot in benefit.chart(runs[:1]).draw(760.0).shapes if _ring(dot)]
    assert len(titles) == len(served) == 8
    one = served[0]
    what = f"{one['accuracy']:.1%} of {one['samples']} samples"
    assert f"device 0, {one['group']}, runs {one['size']}: {what}" in titles
    many = replace(runs[0], served=[{**one, "device": n} for n in range(1000)])
    rings = [dot for dot in benefit.chart([many]).draw(760.0).shapes if _ring(dot)]
    assert 30 <= len(rings) <= benefit.DEVICES


def _ring(shape: object) -> bool:
    return isinstance(shape, Dot) and shape.title.startswith("device ")


def test_totals_are_the_result_of_the_run(runs: list[Run]) -> None:
    for run in runs:
        totals, result = run.totals(), run.result
        for key in ("accuracy", "sizes", "bytes_up", "bytes_down", "flops"):
            assert totals[key] == result[key], key
        known = {group: peak for group, peak in result["peak_bytes"].items() if peak}
        assert totals["peak_bytes"] == known
        refused = sum(refusal["times"] for refusal in result["refused"])
        assert sum(entry["times"] for entry in totals["refused"]) == refused


def test_reasons_and_config_are_in_it(report: Path, runs: list[Run]) -> None:
    text = report.read_text()
    assert "one training step of the full model needs" in text
    assert "devices = 8" in text
    assert runs[0].result["state_sha256"] in text
    assert runs[0].environment["torch"] in text


def test_a_single_run_and_figures_for_papers(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "run")
    answer = sizewise("report", tmp_path / "run", "--figures", tmp_path / "figures")
    assert answer.code == 0, answer.err
    text = (tmp_path / "run" / "report.html").read_text()
    assert "fedavg reaches" in text
    assert "The table" not in text
    made = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert made == sorted(f"{name}.{end}" for name in CHARTS for end in ("csv", "pdf", "svg"))


def test_a_run_of_an_earlier_version_still_has_a_report(
    folders: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "run")
    for name in ("plan.json", "environment.json", "result.json"):
        (tmp_path / "run" / name).unlink()
    with (tmp_path / "run" / "updates.jsonl").open("a") as file:
        file.write('{"round": 4, "dev')  # a line that is being written
    assert sizewise("report", tmp_path / "run").code == 0


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    assert_one_sentence(sizewise("report", tmp_path), "neither a run folder nor a comparison")
    assert_one_sentence(sizewise("report", tmp_path / "none"), "neither a run folder nor")
    (tmp_path / "config.toml").write_text('seed = 0\n[method]\nname = "fedavg"\n')
    assert_one_sentence(sizewise("report", tmp_path), "has been evaluated yet")
    assert not (tmp_path / "report.html").exists()


def test_runs_that_differ_in_something_else_keep_apart(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "other")
    found = records.read([folders[0], tmp_path / "other"])
    assert [run.row for run in found] == [folders[0].name, "other"]


def test_a_headline_does_not_overstate(runs: list[Run]) -> None:
    clear = [Row("a", (0, 1), (0.90, 0.92)), Row("b", (0, 1), (0.70, 0.72))]
    assert page.headline(clear, runs) == "a leads on digits with 91.0%"
    close = [Row("a", (0, 1), (0.90, 0.92)), Row("b", (0, 1), (0.95, 0.86))]
    assert page.headline(close, runs) == "a and b are close on digits: 91.0%, 90.5%"
    assert page.headline([Row("a", (0,), (0.5,))], runs) == "a reaches 50.0% on digits"


def test_a_headline_says_which_size_it_means(runs: list[Run]) -> None:
    """The main size of b has 34 %, its third one 80 %: it is not left out."""
    one, two = Row("a", (0,), (0.5,)), Row("b", (0,), (0.34,), "full", 0.796, "3", 0.1, "1", 0.4)
    assert page.headline([one, two], runs) == (
        "a leads on digits with 50.0% (main size); the best size of b has 79.6%"
    )
    assert page.headline([two], runs) == (
        "b reaches 34.0% on digits (main size); the best size has 79.6%"
    )
    mean = replace(two, main="mean")
    assert page.headline([mean], runs).startswith("b reaches 34.0% on digits (mean of sizes);")


def test_a_run_in_which_nothing_was_learned(runs: list[Run]) -> None:
    failed = replace(runs[0], result={**runs[0].result, "error": "no update was merged"})
    text = page.html([failed])
    assert "<h1>nothing was learned on digits</h1>" in text
    assert "no update was merged</td>" in text


# ---- in a browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375], ids=["desktop", "phone"])
def test_the_report_in_a_browser(
    chromium: browser.Page, report: Path, width: int, dark: bool
) -> None:
    """No complaint, no request but for the file itself, nothing wider than the window."""
    chromium.open(report, width, 900, dark)
    asked = [url for url in chromium.requests if not url.startswith("data:")]
    assert asked == [report.resolve().as_uri()]
    assert chromium.complaints == []
    assert chromium.ask("document.documentElement.scrollWidth") <= width
    visible = "[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length)"
    kind = "wide" if width > 640 else "narrow"
    shown = chromium.ask(f"{visible}.map(s => s.classList[0])")
    tabs = sum(name in page.tab_names() for name in CHARTS)
    assert shown == [kind] * (len(CHARTS) - tabs + 1), "one of the tabs, and the other charts"
    # Words of a drawing must not leave it, nor be too small to read.
    outside = chromium.ask(
        f"{visible}.flatMap(s => [...s.querySelectorAll('text')].filter(t => {{"
        "const a = t.getBoundingClientRect(), b = s.getBoundingClientRect();"
        "return a.left < b.left - 2 || a.right > b.right + 2"
        "}).map(t => t.textContent))"
    )
    assert outside == []
    smallest = chromium.ask(
        f"Math.min(...{visible}.flatMap(s => [...s.querySelectorAll('text')]"
        ".map(t => t.getBoundingClientRect().height)))"
    )
    assert smallest >= 10
    page_colour = chromium.ask("getComputedStyle(document.body).backgroundColor")
    assert (page_colour == "rgb(22, 24, 27)") == dark
    if folder := os.environ.get("SIZEWISE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        chromium.screenshot(Path(folder, f"{width}-{'dark' if dark else 'light'}.png"))


def test_tabs_work_with_mouse_and_keyboard(chromium: browser.Page, report: Path) -> None:
    chromium.open(report, 1280, 900)
    shown = "[...document.querySelectorAll('.tabs figure')].filter(f => f.getClientRects().length)"
    assert chromium.ask(f"{shown}.map(f => f.className)") == ["panel-accuracy-round"]
    chromium.ask("document.querySelector('label[for=accuracy-flops]').click()")
    assert chromium.ask(f"{shown}.map(f => f.className)") == ["panel-accuracy-flops"]
    assert chromium.ask("document.querySelector('#accuracy-flops').tabIndex") == 0


def test_values_show_at_the_pointer(chromium: browser.Page, report: Path, runs: list[Run]) -> None:
    chromium.open(report, 1280, 900)
    chart = "document.querySelector('.panel-accuracy-round svg.wide')"
    chromium.ask(f"{chart}.scrollIntoView()")
    tips = f"[...{chart}.querySelectorAll('.tip')]"
    shown = f"{tips}.filter(t => getComputedStyle(t).visibility == 'visible')"
    assert chromium.ask(f"{tips}.length") == 3, "one for each round"
    assert chromium.ask(f"{shown}.length") == 0
    where = chromium.ask(
        f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
        f"({chart}.querySelectorAll('.hover > rect')[1].getBoundingClientRect())"
    )
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    (words,) = chromium.ask(
        f"{shown}.map(t => [...t.querySelectorAll('text')].map(x => x.textContent))"
    )
    second = [fmean(r.points[1].value for r in runs if r.row == m) for m in ("fedavg", "heterofl")]
    assert words[0] == "round 2"
    assert sorted(words[1:]) == sorted(
        f"{value:.1%}  {name}" for value, name in zip(second, ("fedavg", "heterofl"), strict=True)
    )


def test_on_paper_nothing_is_folded_or_cut(chromium: browser.Page, report: Path) -> None:
    chromium.open(report, 700, 900)
    hidden = "document.querySelector('details pre').checkVisibility({contentVisibilityAuto: true})"
    assert not chromium.ask(hidden)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.ask(hidden)
    assert chromium.ask("document.documentElement.scrollWidth") <= 700
    wide = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
    assert max(chromium.ask(wide)) <= 700
    assert chromium.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown = "[...document.querySelectorAll('.tabs figure')].filter(f => f.getClientRects().length)"
    assert chromium.ask(f"{shown}.length") == 5
    chromium.call("Emulation.setEmulatedMedia", media="")
    made = base64.b64decode(chromium.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert 5 <= len(re.findall(rb"/Type /Page\b", made)) <= 12


def test_the_browser_test_would_notice(chromium: browser.Page, tmp_path: Path) -> None:
    """Fault planted: a script that complains, an image from elsewhere, a box too wide."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<div style='width:3000px'>x</div><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.log('said'); missing()</script>"
    )
    chromium.open(bad, 800, 600)
    assert "http://127.0.0.1:9/x.png" in chromium.requests
    assert any("said" in complaint for complaint in chromium.complaints)
    assert any("Uncaught" in complaint for complaint in chromium.complaints)
    assert chromium.ask("document.documentElement.scrollWidth") > 800


def test_the_plan_is_noted_with_the_run(folders: list[Path]) -> None:
    rows = json.loads((folders[-1] / "plan.json").read_text())
    assert [row["group"] for row in rows] == ["20kB", "200kB", "2MB"]
