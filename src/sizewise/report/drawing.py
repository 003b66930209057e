"""A drawing: lines, areas, boxes, dots and words, written as SVG or PDF.

Colours are names of a palette, so that one drawing suits light and dark pages and paper.
"""

from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

_COLOURS = {
    "ink": ("#1d1d1b", "#ece8df"),
    "muted": ("#68665f", "#a5a198"),
    "rule": ("#d8d4c9", "#3b3d40"),
    "faint": ("#ece8dd", "#27292c"),
    "paper": ("#fffdf8", "#16181b"),
    "bad": ("#b3261e", "#ff8a80"),
    "s0": ("#0072b2", "#62b5ea"),
    "s1": ("#d55e00", "#ff9a57"),
    "s2": ("#00795c", "#4fcaa4"),
    "s3": ("#a8467f", "#e294c4"),
    "s4": ("#8c6400", "#e2b84a"),
    "s5": ("#2c83a8", "#8fd3ee"),
    "s6": ("#6a4fb0", "#b6a2f2"),
    "s7": ("#4a4a48", "#c4c1ba"),
}
PALETTE = {name: light for name, (light, _) in _COLOURS.items()}
"""On paper: Okabe and Ito's colours, darkened to stand out from white."""
DARK = {name: dark for name, (_, dark) in _COLOURS.items()}
"""The same, for dark pages."""

SERIES = 8
"""Colours for lines of a chart; after these they begin again, with other dashes."""


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = "ink"
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    colour: str
    opacity: float = 0.15


@dataclass(frozen=True)
class Box:
    """A rectangle; without `fill` only its outline."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    fill: bool = True
    title: str = ""


@dataclass(frozen=True)
class Dot:
    """A circle; without `fill` only its outline."""

    x: float
    y: float
    radius: float
    colour: str
    opacity: float = 1.0
    fill: bool = True
    title: str = ""


@dataclass(frozen=True)
class Text:
    """Words; `y` is their base line."""

    x: float
    y: float
    words: str
    colour: str = "ink"
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Line | Area | Box | Dot | Text


@dataclass(frozen=True)
class Hover:
    """Shapes that a page shows while the pointer is over a rectangle; files do not have them."""

    x: float
    y: float
    width: float
    height: float
    shapes: tuple[Shape, ...]


@dataclass
class Drawing:
    """Shapes on a sheet of some pixels, in the order in which they are drawn; y grows downwards.

    The label says what it shows, for those who cannot see it.
    """

    width: float
    height: float
    label: str
    shapes: list[Shape | Hover] = field(default_factory=list)

    def add(self, *shapes: Shape | Hover) -> None:
        """Draw on top of what is there."""
        self.shapes += shapes

    def svg(self, attributes: str = "") -> str:
        """Return it as an SVG element for a page that defines the palette as CSS variables."""
        body = "".join(_svg(shape) for shape in self.shapes)
        return (
            f'<svg {attributes} viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" '
            f'aria-label="{escape(self.label)}">{body}</svg>'
        )

    @property
    def _still(self) -> list[Shape]:
        """What does not need a pointer."""
        return [shape for shape in self.shapes if not isinstance(shape, Hover)]

    def standalone(self) -> str:
        """Return it as an SVG file that stands alone, on paper."""
        text = replace(self, shapes=[*self._still]).svg(
            f'xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" '
            f'height="{_n(self.height)}" font-family="Helvetica, Arial, sans-serif"'
        )
        for name, colour in PALETTE.items():
            text = text.replace(f"var(--{name})", colour)
        return text + "\n"

    def pdf(self, path: Path) -> None:
        """Write it as PDF, with its words as text."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with matplotlib.rc_context({"pdf.fonttype": 42, "font.family": "sans-serif"}):
            figure = pyplot.figure(figsize=(self.width / 72, self.height / 72))
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, self.width), ylim=(self.height, 0))
            axes.axis("off")
            for order, shape in enumerate(self._still):
                _paint(axes, shape, order)
            figure.savefig(path, metadata={"CreationDate": None})
            pyplot.close(figure)


def _n(value: float) -> str:
    """Return a number without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: tuple[tuple[float, float], ...]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _titled(tag: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{escape(title)}</title></{tag}>"


def _svg(shape: Shape | Hover) -> str:
    if isinstance(shape, Hover):
        place = _place(shape)
        tip = "".join(_svg(part) for part in shape.shapes)
        return f'<g class="hover"><rect {place} fill="transparent"/><g class="tip">{tip}</g></g>'
    colour = f"var(--{shape.colour})"
    if isinstance(shape, Line):
        dash = f' stroke-dasharray="{" ".join(map(_n, shape.dash))}"' if shape.dash else ""
        return (
            f'<polyline points="{_path(shape.points)}" fill="none" stroke="{colour}" '
            f'stroke-width="{_n(shape.width)}" stroke-linejoin="round"{dash}/>'
        )
    if isinstance(shape, Area):
        opacity = f'fill-opacity="{_n(shape.opacity)}"'
        return f'<polygon points="{_path(shape.points)}" fill="{colour}" {opacity}/>'
    if isinstance(shape, Text):
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{_n(shape.x)}" y="{_n(shape.y)}" fill="{colour}" '
            f'font-size="{_n(shape.size)}" text-anchor="{shape.anchor}"{weight}>'
            f"{escape(shape.words)}</text>"
        )
    paint = (
        f'fill="{colour}" fill-opacity="{_n(shape.opacity)}"'
        if shape.fill
        else f'fill="none" stroke="{colour}" stroke-opacity="{_n(shape.opacity)}"'
    )
    if isinstance(shape, Dot):
        place = f'cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}"'
        return _titled("circle", f"{place} {paint}", shape.title)
    return _titled("rect", f"{_place(shape)} {paint}", shape.title)


def _place(shape: Box | Hover) -> str:
    size = f'width="{_n(shape.width)}" height="{_n(shape.height)}"'
    return f'x="{_n(shape.x)}" y="{_n(shape.y)}" {size}'


def _paint(axes: Any, shape: Shape, order: int) -> None:
    from matplotlib.patches import Circle, Polygon, Rectangle

    colour = PALETTE[shape.colour]
    if isinstance(shape, Line):
        xs, ys = zip(*shape.points, strict=True)
        dashes = (0, tuple(part / shape.width for part in shape.dash)) if shape.dash else "-"
        axes.plot(xs, ys, color=colour, lw=shape.width, ls=dashes, zorder=order)
    elif isinstance(shape, Area):
        patch = Polygon(shape.points, color=colour, alpha=shape.opacity, lw=0, zorder=order)
        axes.add_patch(patch)
    elif isinstance(shape, Text):
        weight = "bold" if shape.bold else "normal"
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        axes.text(
            shape.x,
            shape.y,
            shape.words.replace("$", r"\$"),
            color=colour,
            size=shape.size * 0.92,  # matplotlib's own font is wider than what browsers use
            ha=align,
            va="baseline",
            weight=weight,
            zorder=order,
        )
    else:
        style: dict[str, Any] = {
            "alpha": shape.opacity,
            "fill": shape.fill,
            "color": colour,
            "zorder": order,
            "linewidth": 0 if shape.fill else 1,
        }
        if isinstance(shape, Dot):
            axes.add_patch(Circle((shape.x, shape.y), shape.radius, **style))
        else:
            axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, **style))


def words_width(words: str, size: float = 12.0) -> float:
    """Return about how wide words are, in pixels."""
    return 0.54 * size * len(words)


def shortened(words: str, width: float, size: float = 12.0) -> str:
    """Return words cut to about a width."""
    fitting = max(1, int(width / (0.54 * size)))
    return words if len(words) <= fitting else words[: fitting - 1] + "…"
