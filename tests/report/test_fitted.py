"""Tables on terminals of any width."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from sizewise.report.fitted import Column, fitted

words = st.text("abcdefghij", min_size=1, max_size=9)
heads = st.lists(words, min_size=1, max_size=3).map(" ".join)
names = st.text("abc-", min_size=1, max_size=70)
figures = st.text("0123456789,", min_size=1, max_size=11)


def shown(width: int, *columns: list[Column], caption: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in fitted(width, *columns, caption=caption):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column], list[Column]]:
    rows = draw(st.integers(1, 3))
    first = Column("class", draw(st.lists(names, min_size=rows, max_size=rows)), right=False)
    cells = st.lists(figures, min_size=rows, max_size=rows)
    others = [Column(head, draw(cells)) for head in draw(st.lists(heads, min_size=1, max_size=9))]
    return [first], others


@given(tables(), st.integers(40, 130))
def test_no_heading_is_cut_and_no_figure_broken(
    given_columns: tuple[list[Column], list[Column]], width: int
) -> None:
    text = shown(width, *given_columns)
    found = text.split()
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for column in given_columns[1]:
        assert set(column.head.split()) <= set(found)
        assert set(map(str, column.cells)) <= set(found)


def test_groups_share_a_table_only_where_nothing_wraps() -> None:
    name, first = Column("", ["a"], right=False), Column("first", ["1 2 3 4 5"], wraps=True)
    second = Column("second", ["x"])
    assert len(fitted(23, [name], [first], [second])) == 1
    assert len(fitted(22, [name], [first], [second])) == 2
    assert len(fitted(22, [name], [first, second])) == 1


def test_cells_are_taken_as_they_are() -> None:
    column = Column("[bold]", ["[red]", Text("dim", "dim")])
    text = shown(30, [column], [Column("x", ["1", "2"])], caption="two rows")
    assert {"[bold]", "[red]"} <= set(text.split())
    assert "two rows" in text
    assert "dim" in text
