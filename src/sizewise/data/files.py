"""Data in files: a folder of parquet, CSV or JSON lines, a single such file, or folders of images.

A split is `train.csv` or `train-*.csv`; where a split has files of several kinds, the first of
`ENDINGS` counts. Images lie in a folder for each class, `train/cat/1.png`, or `cat/1.png` without
a test set; they come in the order of their classes and paths.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sizewise.data.columns import IMAGE_ENDINGS
from sizewise.data.labels import in_order
from sizewise.data.reading import TEST_SPLITS
from sizewise.data.tables import Plain, Stream, Table
from sizewise.errors import DataError

ENDINGS = ("parquet", "csv", "jsonl")
LARGEST_BLOCK = 2**31 - 1


def find(place: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a folder, in order; a single file is for training."""
    if place.is_file():
        return {"train": [place]} if place.suffix[1:] in ENDINGS else {}
    found = {}
    for split in ("train", *TEST_SPLITS):
        kinds = (sorted(place.glob(f"{split}[-.]*{ending}")) for ending in ENDINGS)
        files = next((paths for paths in kinds if paths), [])
        found[split] = files or _images(place / split)
    if not found["train"]:
        found = {"train": _images(place)}
    return {split: paths for split, paths in found.items() if paths}


def _images(folder: Path) -> list[Path]:
    """Return the images in the folders of a folder, class by class."""
    classes = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    return [
        path
        for name in in_order(name for name, path in classes.items() if path.is_dir())
        for path in sorted(classes[name].rglob("*"))
        if path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")
    ]


def open_splits(place: Path, found: Mapping[str, Sequence[Path]]) -> dict[str, Table]:
    """Return the splits of a folder or file; parquet is read when it is asked for."""
    import datasets

    stored = {
        split: [str(path) for path in paths]
        for split, paths in found.items()
        if paths[0].suffix == ".parquet"
    }
    splits: dict[str, Table] = {}
    if stored:
        streams = datasets.load_dataset("parquet", data_files=stored, streaming=True)
        splits |= {split: Stream(s, _first(stored[split][0])) for split, s in streams.items()}
    for split, paths in found.items():
        if paths[0].suffix[1:] in ("csv", "jsonl"):
            splits[split] = Stream(datasets.Dataset(_table(paths)))
        elif split not in stored:
            home = place / split if (place / split).is_dir() else place
            classes = [path.relative_to(home).parts[0] for path in paths]
            splits[split] = Plain({"image": list(map(str, paths)), "label": classes})
    return splits


def _first(path: str) -> dict[str, object]:
    """Return the texts in the first row of a parquet file."""
    from pyarrow import parquet, types

    with parquet.ParquetFile(path) as file:
        texts = [
            field.name
            for field in file.schema_arrow
            if types.is_string(field.type) or types.is_large_string(field.type)
        ]
        for batch in file.iter_batches(1, columns=texts):
            return {name: batch[name][0].as_py() for name in texts}
    return {}


def _table(paths: Sequence[Path]) -> Any:
    """Return the rows of some CSV or JSON lines files, as one Arrow table."""
    import pyarrow
    from pyarrow import csv, json

    tables = []
    for path in paths:
        # In one block: a row must not be longer than one.
        block = min(path.stat().st_size + 1, LARGEST_BLOCK)
        if path.suffix == ".csv":
            lines = csv.ParseOptions(newlines_in_values=True)
            tables.append(csv.read_csv(path, csv.ReadOptions(block_size=block), lines))
            if any(map(pyarrow.types.is_binary, tables[-1].schema.types)):
                raise DataError(f"{path} is not in UTF-8; save it so")
        else:
            tables.append(json.read_json(path, json.ReadOptions(block_size=block)))
    return pyarrow.concat_tables(tables, promote_options="permissive")
