"""Models of timm and transformers that nobody wrote for sizewise, with six methods each.

    python benchmarks/anything.py [--models NAME...] [--methods NAME...] [--write] [--smoke]

No config has a line about the model's anatomy: blocks are found, channels are traced. Images are
digits, texts are SST-2 ($SIZEWISE_DATA) with a tokenizer of its commonest words. Budgets are shares
of what a plain step of the model takes. A cell of the table counts as run if devices have trained,
everybody held as many bytes as were predicted, within its budget, and, where the model is cut by
width, the library's own check of the cut has passed. It is wrong if bytes were others, or something
else than a sentence came. Else it was refused, with its sentence.
"""

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import tokenizers

import common
import outside_modules
from sizewise import config, session
from sizewise.errors import SizewiseError
from sizewise.runs.preparation import prepare

METHODS = ("heterofl", "fedepth", "nefl", "depthfl", "inclusivefl", "slt")
SHARES = (0.6, 0.8, 1.2)
"""Budgets of the three classes of devices, as shares of what the whole model takes."""

_TEXT = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_IMAGE = {**_TEXT, "patch_size": 4, "intermediate_size": 96}

MODELS: dict[str, dict[str, Any]] = {
    "timm:vit_tiny_patch16_224": {
        **{"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4},
    },
    "timm:deit_tiny_distilled_patch16_224": {
        **{"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4},
    },
    "timm:cait_xxs24_224": {"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4},
    "timm:swin_tiny_patch4_window7_224": {
        **{"patch_size": 2, "window_size": 4, "embed_dim": 24},
        **{"depths": [2, 2], "num_heads": [3, 6]},
    },
    "timm:resnet26": {"channels": [8, 16, 24, 32]},
    "timm:mobilenetv3_small_050": {},
    "timm:convnext_atto": {"depths": [1, 1, 2, 1], "dims": [16, 24, 32, 48]},
    "timm:regnety_002": {"depth": 8, "w0": 8, "wa": 12.0, "group_size": 8},
    "transformers:ElectraForSequenceClassification": {
        **_TEXT,
        **{"intermediate_size": 96, "embedding_size": 32},
    },
    "transformers:AlbertForSequenceClassification": {
        **_TEXT,
        **{"intermediate_size": 96, "embedding_size": 32},
    },
    "transformers:GPT2ForSequenceClassification": {"n_embd": 48, "n_layer": 4, "n_head": 4},
    "transformers:OPTForSequenceClassification": {
        **_TEXT,
        **{"ffn_dim": 96, "word_embed_proj_dim": 48},
    },
    "transformers:LlamaForSequenceClassification": {
        **_TEXT,
        **{"intermediate_size": 96, "num_key_value_heads": 2},
    },
    "transformers:ViTForImageClassification": _IMAGE,
    "transformers:ConvNextForImageClassification": {
        **{"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 48]},
    },
}

SMALLEST = {
    "transformers:ViTForImageClassification": {
        **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 12, "patch_size": 4},
    }
}


@dataclass(frozen=True)
class Cell:
    """What came of one model with one method.

    Attributes:
        outcome: "runs", "refused" or "wrong".
        said: How it ran, or the sentence of the refusal.
        seconds: How long it took.
    """

    outcome: str
    said: str
    seconds: float


def is_text(name: str) -> bool:
    """Return whether a model is for texts."""
    return name.endswith("SequenceClassification")


def words(folder: Path, most: int = 1000) -> str:
    """Write a tokenizer of the commonest words of SST-2, and return its path."""
    stored = sorted(Path(os.environ["SIZEWISE_DATA"], "glue", "sst2").glob("train-*.parquet"))
    texts = pyarrow.parquet.read_table(stored[0], columns=["sentence"])["sentence"].to_pylist()
    counts = Counter(word for text in texts for word in text.split())
    known = ["[PAD]", "[UNK]", *(word for word, _ in counts.most_common(most - 2))]
    numbers = {word: number for number, word in enumerate(known)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=known[1]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer.json"
    made.save(str(path))
    return str(path)


def configured(
    name: str, args: Mapping[str, Any], method: str, budgets: list[int], tokenizer: str, size: int
) -> config.Config:
    """Return the config of a cell."""
    data: dict[str, Any] = {"name": "digits", "image_size": size}
    if is_text(name):
        data = {"name": "glue/sst2", "tokenizer": tokenizer, "max_tokens": 16}
    return config.from_dict(
        {
            "rounds": 2,
            "model": {"name": name, "args": dict(args)},
            "data": {**data, "train_limit": 72, "test_limit": 32},
            "fleet": {"devices": 3, "per_round": 3, "budgets": budgets},
            "method": {"name": method},
            "recipe": {"batch": 8, "lr": 0.01},
        }
    )


def tried(name: str, args: Mapping[str, Any], method: str, tokenizer: str, size: int) -> Cell:
    """Train a model with a method, and say what came of it."""
    start = time.perf_counter()

    def cell(outcome: str, said: str) -> Cell:
        return Cell(outcome, said, time.perf_counter() - start)

    try:
        whole = prepare(configured(name, args, "fedavg", [10**12], tokenizer, size)).method
        full = whole.peak(whole.main)
        budgets = [int(share * full) for share in SHARES]
        chosen = configured(name, args, method, budgets, tokenizer, size)
        with tempfile.TemporaryDirectory() as folder:
            with session.started(chosen, Path(folder, "run")) as federation:
                federation.run()
            stored = Path(folder, "run", "updates.jsonl").read_text(encoding="utf-8")
    except SizewiseError as error:
        return cell("refused", str(error))
    except Exception as error:  # a cell that breaks must not end the table
        return cell("wrong", f"{type(error).__name__}: {error}")
    updates = [line for line in map(json.loads, stored.splitlines()) if not line["refused"]]
    for line in updates:
        if not line["peak_bytes"] == line["predicted"] <= line["budget"]:
            numbers = [line[key] for key in ("peak_bytes", "predicted", "budget")]
            return cell("wrong", f"{line['group']}: metered, predicted and budget are {numbers}")
    trained = {line["group"] for line in updates}
    return cell("runs", f"{len(trained)} of {len(SHARES)}")


def lines(cells: Mapping[tuple[str, str], Cell], methods: tuple[str, ...]) -> Iterator[str]:
    """Yield the table, then the sentences of cells that did not run."""
    yield common.head("model", *methods)
    for name in dict.fromkeys(name for name, _ in cells):
        row = [cells[name, method] for method in methods]
        yield f"| {name} | {' | '.join(_short(cell) for cell in row)} |"
    counts = Counter(cell.outcome for cell in cells.values())
    yield ""
    yield (
        f"Of {len(cells)} cells {counts['runs']} run, {counts['refused']} were refused and "
        f"{counts['wrong']} are wrong."
    )
    for (name, method), cell in cells.items():
        if cell.outcome != "runs":
            yield f"\n- {name}, {method}, {cell.outcome}: {cell.said}"


def _short(cell: Cell) -> str:
    return cell.said if cell.outcome == "runs" else cell.outcome


def main() -> None:
    """Print the table; with `--write`, into anything.md as well."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--write", action="store_true", help="write anything.md")
    given = parser.parse_args()
    models, methods = {name: MODELS[name] for name in given.models}, tuple(given.methods)
    if given.smoke:
        models, methods = SMALLEST, ("fedepth", "depthfl", "nefl")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if any(name.startswith("timm:") for name in models):
        outside_modules.import_timm()
    cells: dict[tuple[str, str], Cell] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = words(Path(folder)) if any(map(is_text, models)) else ""
        for name, args in models.items():
            for method in methods:
                found = tried(name, args, method, tokenizer, 8 if given.smoke else 32)
                cells[name, method] = found
                note = f"{name} {method}: {found.outcome}, {found.said} ({found.seconds:.0f} s)"
                print(note, file=sys.stderr, flush=True)
    text = "\n".join(lines(cells, methods))
    print(text)
    if given.write:
        Path(__file__).with_suffix(".md").write_text(f"{HEADER}\n{text}\n", encoding="utf-8")


HEADER = """# Models that nobody wrote for sizewise

`python benchmarks/anything.py --write`: models of timm and transformers in small sizes, with random
weights, on digits (32x32) and SST-2, two rounds, three classes of devices with 60, 80 and 120 % of
the bytes of a plain step. No config says anything about a model's anatomy. A cell says how many of
the three classes trained; the others were refused for lack of bytes.
"""


if __name__ == "__main__":
    main()
