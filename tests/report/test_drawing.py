"""Drawings are valid SVG and PDF, and say the same in both."""

import xml.etree.ElementTree as ET
from pathlib import Path

from sizewise.report.drawing import (
    DARK,
    PALETTE,
    Area,
    Box,
    Dot,
    Drawing,
    Hover,
    Line,
    Text,
    shortened,
)


def drawing() -> Drawing:
    made = Drawing(200, 100, "a <small> & odd drawing")
    made.add(
        Line(((0, 0), (10, 5.25)), "s0", 2, (4, 2)),
        Area(((0, 0), (10, 0), (10, 10)), "s1"),
        Box(1, 2, 3, 4, "s2", title="a & b"),
        Dot(5, 5, 2, "bad", fill=False),
        Text(3, 3, "50 % < 1 $", "ink", 12, "end", True),
    )
    return made


def test_svg_is_well_formed_and_escaped() -> None:
    (root,) = [ET.fromstring(drawing().standalone())]  # noqa: S314  (our own)
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("aria-label") == "a <small> & odd drawing"
    assert [child.tag.removeprefix(space) for child in root] == [
        *("polyline", "polygon", "rect", "circle", "text")
    ]
    line, _, box, dot, words = root
    assert line.get("points") == "0,0 10,5.25"
    assert line.get("stroke-dasharray") == "4 2"
    assert box[0].text == "a & b"
    assert (dot.get("fill"), dot.get("stroke")) == ("none", PALETTE["bad"])
    assert (words.text, words.get("text-anchor")) == ("50 % < 1 $", "end")


def test_a_page_colours_it_and_paper_has_its_own() -> None:
    assert "var(--s0)" in drawing().svg()
    assert "var(" not in drawing().standalone()


def test_what_needs_a_pointer_is_on_pages_only(tmp_path: Path) -> None:
    made = drawing()
    made.pdf(tmp_path / "without.pdf")
    made.add(Hover(0, 0, 9, 9, (Text(1, 1, "only here"),)))
    assert '<g class="hover"><rect x="0" y="0" width="9" height="9"' in made.svg()
    assert '<g class="tip"><text x="1"' in made.svg()
    assert "only here" not in made.standalone()
    made.pdf(tmp_path / "with.pdf")
    assert (tmp_path / "with.pdf").read_bytes() == (tmp_path / "without.pdf").read_bytes()


def test_pdf_is_written_the_same_every_time(tmp_path: Path) -> None:
    drawing().pdf(tmp_path / "a.pdf")
    drawing().pdf(tmp_path / "b.pdf")
    first = (tmp_path / "a.pdf").read_bytes()
    assert first.startswith(b"%PDF")
    assert first == (tmp_path / "b.pdf").read_bytes()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_the_page() -> None:
    """WCAG 2.2: 4.5 for words, also coloured ones, on light and dark pages."""
    for palette in (PALETTE, DARK):
        for name, colour in palette.items():
            if name not in ("rule", "faint", "paper"):
                assert contrast(colour, palette["paper"]) >= 4.5 - (name[0] == "s") * 0.9, name
        assert contrast(palette["muted"], palette["paper"]) >= 4.5
    assert PALETTE.keys() == DARK.keys()


def test_words_are_cut_to_their_room() -> None:
    assert shortened("short", 100) == "short"
    assert shortened("a very long name of a size", 60, 12) == "a very l…"
