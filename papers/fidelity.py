"""Which published orders come out here: every pair of rows of the papers' main tables, judged.

    python papers/fidelity.py          # writes papers/FIDELITY.md from the committed results

A suite says what its paper printed, as `[[published]]` tables: a setting, a number for each row,
and under `notes`, by scale, what we know of pairs that are contradicted. Results are those of
`NAME.SCALE.json` beside it. All rows of a suite share data, splits and devices of a seed, so seeds
are blocks of a two-way layout: an accuracy is its row's, plus its seed's, plus an error. A
difference of two rows has an interval of 95 % from the errors of all rows of its setting. A pair is
reproduced if that interval lies on the published side of 0, contradicted if on the other, and not
resolved if it holds 0. Of one seed nothing is known about errors.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import t

import common
from results import Results, successes

PAPERS = Path(__file__).resolve().parent
WIDTH = 100
VERDICTS = ("reproduced", "not resolved", "contradicted")

METRICS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "main": lambda result: float(result["accuracy"]),
    "worst": lambda result: min(result["sizes"].values()),
    "mean": lambda result: fmean(result["sizes"].values()),
}
"""What can be compared of a run: its main model, the worst of its sizes, or their mean."""


@dataclass(frozen=True)
class Pair:
    """Two rows of a setting, the one that is higher in the paper first.

    Attributes:
        rows: Their names.
        published: By how many points the first is higher in the paper.
        found: And here, in the mean over seeds.
        error: Half of the 95 % interval of what was found; infinite if there is one seed.
    """

    rows: tuple[str, str]
    published: float
    found: float
    error: float

    @property
    def verdict(self) -> str:
        """Whether the published order came out."""
        if abs(self.found) <= self.error:
            return "not resolved"
        return "reproduced" if self.found > 0 else "contradicted"


def half_interval(accuracies: Sequence[Sequence[float]]) -> float:
    """Return half of the 95 % interval of a difference of two rows' means.

    Args:
        accuracies: For each row, one accuracy a seed; the same seeds in all rows.
    """
    rows, seeds = len(accuracies), len(accuracies[0])
    freedom = (rows - 1) * (seeds - 1)
    if not freedom:
        return math.inf
    total = fmean(map(fmean, accuracies))
    blocks = [fmean(column) - total for column in zip(*accuracies, strict=True)]
    errors = [
        (value - fmean(row) - block) ** 2
        for row in accuracies
        for value, block in zip(row, blocks, strict=True)
    ]
    deviation = math.sqrt(sum(errors) / freedom)
    return float(t.ppf(0.975, freedom)) * deviation * math.sqrt(2 / seeds)


def pairs(published: Mapping[str, float], found: Mapping[str, Sequence[float]]) -> list[Pair]:
    """Return every pair of the published rows that were run, in the order of the paper's numbers.

    Args:
        published: A number for each row, in %.
        found: Accuracies of each row, in %, one a seed; rows may have further seeds at their end.
    """
    rows = sorted((row for row in published if row in found), key=lambda row: -published[row])
    seeds = min((len(found[row]) for row in rows), default=0)
    shared = {row: list(found[row][:seeds]) for row in rows}
    error = half_interval(list(shared.values())) if len(rows) > 1 else math.inf
    return [
        Pair((a, b), published[a] - published[b], fmean(shared[a]) - fmean(shared[b]), error)
        for a, b in combinations(rows, 2)
        if published[a] != published[b]
    ]


@dataclass(frozen=True)
class Setting:
    """A setting of a paper's table, as far as it was run at a scale.

    Attributes:
        title: What it is called.
        pairs: Its pairs of rows.
        note: What is known of those that are contradicted.
    """

    title: str
    pairs: list[Pair]
    note: str


def settings(suite: Path) -> Iterator[Setting]:
    """Yield the settings that a suite has results of."""
    tables = common.Runs(suite, "").tables
    for scale in tables.get("scale", ()):
        results = Results(suite.with_suffix(f".{scale}.json")).rows
        for setting in tables.get("published", ()):
            measure = METRICS[setting.get("metric", "main")]
            found = {
                row: [100 * measure(run) for run in successes(runs)]
                for row, runs in results.items()
            }
            known = [row for row in setting["rows"] if found.get(row)]
            if len(known) > 1:
                seeds = min(len(found[row]) for row in known)
                title = f"{setting['what']}, {scale}, {seeds} seed{'s'[: seeds > 1]}"
                note = setting.get("notes", {}).get(scale, "")
                yield Setting(title, pairs(setting["rows"], found), note)


def shares(found: Sequence[Pair]) -> str:
    """Return how many pairs came out how, in words."""
    count = Counter(pair.verdict for pair in found)
    resolved = count["reproduced"] + count["contradicted"]
    words = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS)
    if not resolved:
        return f"{len(found)} pairs: {words}"
    return f"{len(found)} pairs: {words}; {count['reproduced'] / resolved:.0%} of the resolved"


def card(suites: Sequence[Path]) -> list[str]:
    """Return the lines of the page."""
    every: list[Pair] = []
    body: list[str] = []
    for suite in suites:
        for setting in settings(suite):
            found = setting.pairs
            every += found
            link = f"[{suite.parent.name}/{suite.stem}]({suite.parent.name}/README.md)"
            body += ["", f"## {link}: {setting.title}", "", f"{shares(found)}.", ""]
            body += common.table("higher in the paper", "than", "by", "here", "95 %", "verdict")
            for pair in found:
                spread = "" if math.isinf(pair.error) else f"± {pair.error:.1f}"
                higher, lower = pair.rows
                points = f"{pair.published:.1f} | {pair.found:+.1f} | {spread}".replace(
                    "|  |", "| |"
                )
                body.append(f"| {higher} | {lower} | {points} | {pair.verdict} |")
            if setting.note:
                body += ["", *textwrap.wrap(f"**Contradicted**: {setting.note}", WIDTH)]
    head = [
        "# Fidelity",
        "",
        "Do the published orders come out? Every pair of rows of the papers' main tables that was",
        "run here, at the scales of [papers](README.md): by how many points the one is above the",
        "other in the paper and here, with an interval of 95 % over seeds. A pair is *not*",
        "*resolved* if its interval holds 0, or if there is one seed. The papers' runs are longer",
        "than ours, so orders compare, not points. All rows are tested on the same images or",
        "sentences, and intervals leave out what others would change: where they are 2,000, up to",
        "3 points of a difference. Made by `python papers/fidelity.py`.",
        "",
        f"**In all, {shares(every)}.**",
    ]
    return head + body


def main() -> None:
    """Write the page, or show it for a smoke run."""
    arguments = common.parser(__doc__)
    common.add_smoke(arguments)
    smoke = arguments.parse_args().smoke
    place = Path("fidelity.smoke.md") if smoke else PAPERS / "FIDELITY.md"
    common.write(card(sorted(PAPERS.glob("*/*.toml"))), place)


if __name__ == "__main__":
    main()
