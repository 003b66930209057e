"""Which columns of a table hold what: by their names and types, or by what the config says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sizewise.common.structure import nearest
from sizewise.data.dataset import Target
from sizewise.data.tables import Kind, Table, What
from sizewise.errors import DataError

LABEL_COLUMNS = (
    *("label", "labels", "fine_label", "character", "target", "targets", "class", "y"),
)
OWNER_COLUMNS = ("writer_id", "client_id", "user_id")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "label")
"""Where lists of tags are looked for that are words, as the tokens beside them are."""

IDENTIFIERS = ("id", "idx", "guid", "index", "unnamed: 0", "__index_level_0__")
"""Columns that only number the rows."""

IMAGE_ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"),
)

Form = Literal["images", "paths", "texts", "words", "arrays", "numbers"]


@dataclass(frozen=True)
class Columns:
    """Which columns hold what.

    Attributes:
        form: What the inputs are: images, paths of image files, texts, lists of words, arrays, or
            numbers that make a vector together.
        inputs: Their columns: one or two of texts, any number of numbers, else one.
        label: The column of the labels.
        target: What these are.
        names: Of classes or tags, where the table knows them.
        owner: The column that says whose a row is, if there is one.
    """

    form: Form
    inputs: tuple[str, ...]
    label: str
    target: Target
    names: tuple[str, ...]
    owner: str | None

    def wanted(self) -> list[str]:
        """Return the columns that have to be read."""
        owner = () if self.owner is None else (self.owner,)
        return list(dict.fromkeys((*self.inputs, self.label, *owner)))


def find(
    where: str,
    table: Table,
    label: str | None = None,
    owner: str | None = None,
    *,
    labelled: bool = True,
) -> Columns:
    """Tell the columns of a table by type, and by name where several would do.

    Args:
        where: What an error begins with.
        table: The table.
        label: The column of labels, if it was named.
        owner: The column that says whose a row is, if it was named.
        labelled: Whether labels are learned; else the next tokens of the first column of texts.

    Raises:
        DataError: There is no such column, or nothing that a model can learn from.
    """
    kinds = table.kinds
    for key, column in (("label", label), ("owner", owner)):
        if column is not None and column not in kinds:
            raise DataError(
                f"{where} has no column {column!r}, as data.{key} says; {nearest(column, kinds)}"
            )
    owner = owner or next((key for key in OWNER_COLUMNS if key in kinds), None)
    rest = {key: kind.what for key, kind in kinds.items() if key not in (label, owner)}
    if not labelled:
        texts = [key for key, what in rest.items() if what == "text"]
        if not texts:
            raise DataError(
                f"{where} has no column of texts, only {', '.join(kinds)}, and data.target is "
                "'next'; leave that out, or use other data"
            )
        return Columns("texts", (texts[0],), texts[0], "next", (), owner)
    if (tagged := _tagged(rest, label, kinds)) is not None:
        words, tags = tagged
        return Columns("words", (words,), tags, "tags", kinds[tags].names, owner)
    if label is None:
        classes = [key for key, what in rest.items() if what == "class"]
        named = [key for key in LABEL_COLUMNS if key in (classes or rest)]
        label = next(iter((*named, *classes)), None)
    if label is None:
        raise DataError(
            f"{where} has no label column (called label, target, class or y), only "
            f"{', '.join(kinds)}; say which one it is with data.label"
        )
    rest.pop(label, None)
    form, inputs = _inputs(where, table, rest)
    kind = kinds[label]
    target: Target = "score" if form == "texts" and kind.what == "number" else "class"
    return Columns(form, inputs, label, target, kind.names, owner)


def _tagged(
    rest: Mapping[str, What], label: str | None, kinds: Mapping[str, Kind]
) -> tuple[str, str] | None:
    """Return the column of words and that of their tags, if a table has such and no images."""
    lists = [key for key, what in rest.items() if what == "words"]
    classes = [key for key, what in rest.items() if what == "tags"]
    tags = [label] if label else classes or [key for key in TAG_COLUMNS if key in lists]
    words = [key for key in lists if key not in tags]
    if "image" in rest.values() or not words or not tags:
        return None
    return (words[0], tags[0]) if kinds[tags[0]].what in ("tags", "words") else None


def _inputs(where: str, table: Table, rest: Mapping[str, What]) -> tuple[Form, tuple[str, ...]]:
    """Return what a table has to learn from, the most telling first, and its columns."""

    def of(*whats: What) -> tuple[str, ...]:
        return tuple(
            key for key, what in rest.items() if what in whats and key.lower() not in IDENTIFIERS
        )

    texts = of("text")
    paths = tuple(key for key in texts if _is_path(table, key))
    found: dict[Form, tuple[str, ...]] = {
        "images": of("image")[:1],
        "paths": paths[:1],
        "texts": texts[:2],
        "arrays": of("array")[:1],
        "numbers": of("whole", "number", "truth"),
    }
    for form, columns in found.items():
        if columns:
            return form, columns
    raise DataError(
        f"{where} has a label, and no column of images, paths of images, texts, arrays or numbers "
        f"beside it, only {', '.join(table.kinds)}; add one"
    )


def _is_path(table: Table, column: str) -> bool:
    """Return whether a column of texts holds paths of images, by its first one."""
    first = table.first(column)
    return isinstance(first, str) and Path(first).suffix.lower() in IMAGE_ENDINGS
