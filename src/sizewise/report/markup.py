"""Small pieces of the page: tables, lists of terms, what folds out, what can be saved."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a table that scrolls by itself where it is too wide; the first columns are words."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="words"' if place < words else "" for place in range(len(cells))]
        pairs = zip(kinds, cells, strict=True)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in pairs)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{line('th', heads)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def terms(entries: Iterable[tuple[str, str]], kind: str) -> str:
    """Return a list of terms, each with what is said about it."""
    body = "".join(f"<dt>{escape(term)}</dt><dd>{escape(said)}</dd>" for term, said in entries)
    return f'<dl class="{kind}">{body}</dl>'


def folded(title: str, content: str) -> str:
    """Return something that folds out; on paper it is open."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def facts(entries: Mapping[str, str]) -> str:
    """Return figures in a row, each below what it is."""
    cells = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in entries.items())
    return f'<dl class="facts">{cells}</dl>'


def saved(name: str, kind: str, content: str, words: str) -> str:
    """Return a link that saves a file, which is in the page itself."""
    data = base64.b64encode(content.encode()).decode()
    return f'<a download="{name}" href="data:{kind};charset=utf-8;base64,{data}">{words}</a>'
