"""The files of a data set in a folder: parquet, and for texts also CSV and JSON lines.

A split is `train.csv` or `train-*.csv`. Where a split has files of several kinds, the first of
`ENDINGS` counts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sizewise.data.decode import TEST_SPLITS, Split
from sizewise.errors import DataError

ENDINGS = ("parquet", "csv", "jsonl")
LARGEST_BLOCK = 2**31 - 1


def find(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, in order."""
    found = {}
    for split in ("train", *TEST_SPLITS):
        kinds = (sorted(folder.glob(f"{split}[-.]*{ending}")) for ending in ENDINGS)
        found[split] = next((paths for paths in kinds if paths), [])
    return {split: paths for split, paths in found.items() if paths}


def open_splits(files: Mapping[str, Sequence[Path]]) -> dict[str, Split]:
    """Return the splits of a folder; parquet is read when it is asked for."""
    import datasets

    stored = {
        split: [str(path) for path in paths]
        for split, paths in files.items()
        if paths[0].suffix == ".parquet"
    }
    splits: dict[str, Split] = {}
    if stored:
        splits |= datasets.load_dataset("parquet", data_files=stored, streaming=True)
    for split, paths in files.items():
        if split not in stored:
            splits[split] = datasets.Dataset(_table(paths))
    return splits


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
