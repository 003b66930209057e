"""Tables that fit a terminal: no heading is cut, and no word is broken that has room.

Cells and headings go on in the next line between words; what is still too wide is divided into
several tables, of which each begins with the same columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Its heading.
        cells: What is below, one for each row, as it is or in a style.
        right: Whether cells stand on the right, as figures do.
        wraps: Whether cells may go on in the next line; headings always may.
    """

    head: str
    cells: Sequence[str | Text]
    right: bool = True
    wraps: bool = False

    @property
    def widest(self) -> int:
        """Characters with which nothing goes on in the next line."""
        return max(map(_length, (self.head, *self.cells)))

    @property
    def narrowest(self) -> int:
        """Characters with which no word is broken."""
        cells = map(str, self.cells)
        words = [word for cell in cells for word in (cell.split() if self.wraps else [cell])]
        return max(map(_length, (*self.head.split(), *words)), default=1)


def fitted(
    width: int, first: Sequence[Column], *groups: Sequence[Column], caption: str | None = None
) -> list[Table]:
    """Return one table where there is room for one, else several.

    Args:
        width: Characters of a line.
        first: Columns with which every table begins.
        groups: The others. Those of different groups share a table only if nothing in it has to go
            on in the next line.
        caption: What is said below the last one.
    """
    together = [*first, *(column for group in groups for column in group)]
    if len(groups) == 1 or _taken(column.widest for column in together) <= width:
        groups = (together[len(first) :],)
    parts: list[list[Column]] = []
    for group in groups:
        parts.append([])
        for column in group:
            wanted = [*first, *parts[-1], column]
            if parts[-1] and _taken(each.narrowest for each in wanted) > width:
                parts.append([])
            parts[-1].append(column)
    tables = [_table(width, [*first, *part]) for part in parts]
    tables[-1].caption = caption
    return tables


def _table(width: int, columns: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, share in zip(columns, _shares(width, columns), strict=True):
        side: JustifyMethod = "right" if column.right else "left"
        table.add_column(Text(column.head), justify=side, width=share, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _shares(width: int, columns: Sequence[Column]) -> list[int]:
    """Return the characters of each column: what it must have and, while there are, it wants."""
    shares = [column.narrowest for column in columns]
    # Only the longest of words, as in names that users chose, are broken, where nothing else helps.
    while _taken(shares) > width and max(shares) > 1:
        shares[shares.index(max(shares))] -= 1
    left = width - _taken(shares)
    wishes = [column.widest - share for column, share in zip(columns, shares, strict=True)]
    for number in sorted(range(len(columns)), key=wishes.__getitem__):
        more = max(0, min(wishes[number], left))
        shares[number] += more
        left -= more
    return shares


def _taken(shares: Iterable[int]) -> int:
    """Return the characters of a table whose columns have these: two around each, and an edge."""
    return 1 + sum(share + 2 for share in shares)


def _length(text: str | Text) -> int:
    return cell_len(str(text))
