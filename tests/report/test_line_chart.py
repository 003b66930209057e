"""Lines and the values at the pointer, in exact numbers."""

from itertools import pairwise

from sizewise.report import line_chart, scales
from sizewise.report.drawing import Dot, Hover, Line, Text
from sizewise.report.line_chart import Axes, Curve

SENT = Axes("Accuracy", "sent", "bytes sent", scales.percent, lambda v: f"{v:.1%}", 1.0)
ROUNDS = Axes("Loss", "round", "rounds", scales.number, lambda v: f"{v:.3g}", float("inf"))


def curve(name: str, costs: list[float], values: list[float]) -> Curve:
    return Curve(name, tuple(costs), tuple(values), tuple(values), tuple(values))


def hovers(curves: list[Curve], axes: Axes, width: float = 760.0) -> list[Hover]:
    return [s for s in line_chart.draw(curves, axes, width).shapes if isinstance(s, Hover)]


def words(hover: Hover) -> list[str]:
    return [shape.words for shape in hover.shapes if isinstance(shape, Text)]


def test_a_tip_says_what_each_method_had_reached_by_then() -> None:
    """One method pays 10 MB a round, the other 25: they are not measured at the same places."""
    cheap = curve("cheap", [10e6, 20e6, 30e6], [0.2, 0.4, 0.5])
    dear = curve("dear", [25e6, 50e6], [0.6, 0.9])
    found = [words(hover) for hover in hovers([cheap, dear], SENT)]
    assert found == [
        ["10 MB", "20.0%  cheap"],
        ["20 MB", "40.0%  cheap"],
        ["25 MB", "60.0%  dear", "40.0%  cheap"],
        ["30 MB", "60.0%  dear", "50.0%  cheap"],
        ["50 MB", "90.0%  dear", "50.0%  cheap"],
    ]


def test_places_lie_side_by_side_over_the_whole_chart() -> None:
    found = hovers([curve("a", [1, 2, 4], [3.0, 2.0, 1.0])], ROUNDS)
    assert [words(hover)[0] for hover in found] == ["round 1", "round 2", "round 4"]
    for one, following in pairwise(found):
        assert one.x + one.width == following.x
    assert found[0].x == 42.0
    ruler, dot = found[1].shapes[:2]
    assert isinstance(ruler, Line)
    assert isinstance(dot, Dot)
    assert ruler.points[0][0] == ruler.points[1][0] == dot.x


def test_long_runs_of_many_methods_stay_small() -> None:
    long = [curve(f"m{n}", [*range(1, 2001)], [0.5] * 2000) for n in range(20)]
    found = hovers(long, ROUNDS)
    assert len(found) <= line_chart.TIPS / 20
    assert words(found[-1])[0] == "round 2,000"
    assert len(hovers(long[:1], ROUNDS)) <= line_chart.STOPS


def test_one_round_is_a_chart_too() -> None:
    (only,) = hovers([curve("a", [1], [0.25])], ROUNDS)
    assert words(only) == ["round 1", "0.25  a"]
    assert only.width > 300


def test_tips_stay_on_the_sheet() -> None:
    for width in (760.0, 360.0):
        some = [curve("a method with a long name", [1, 2, 3], [0.1, 0.2, 0.9])]
        for hover in hovers(some, ROUNDS, width):
            assert all(0 <= shape.x <= width for shape in hover.shapes if isinstance(shape, Text))
