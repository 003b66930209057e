"""Tiny texts and encoders: what a text is about can be told from one word in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from sizewise.data.dataset import Dataset, Target
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.families.base import Method
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import IGNORED
from sizewise.training.task import ModelConfig, Task

TOKENS, VOCABULARY, CLASSES = 6, 20, 3
NAMES = {"class": ("a", "b", "c"), "tags": ("O", "B-X", "I-X"), "score": ("score",)}
METRICS = {"class": "accuracy", "tags": "entities", "score": "pearson"}
ARGS = {"layers": 3, "hidden": 16, "heads": 2, "dropout": 0.0}


def text_task(
    target: Target = "class",
    args: dict[str, Any] | None = None,
    budgets: Sequence[int | None] = (None,),
    rounds: int = 3,
    ratios: Sequence[float] = (),
    **recipe: Any,
) -> Task:
    """Return a task with an encoder of three layers; recipe values as keywords."""
    chosen = Recipe(**{"lr": 0.05, "batch": 4, "eval_batch": 6, **recipe})
    return Task(
        ModelConfig("encoder", ARGS | (args or {})),
        chosen,
        (TOKENS,),
        len(NAMES[target]),
        rounds=rounds,
        budgets=tuple(budgets),
        ratios=tuple(ratios),
        vocabulary=VOCABULARY,
        target=target,
        metric=METRICS[target],
    )


def texts(count: int, target: Target, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return token ids (N, T), some of them padded with 0, and labels."""
    ids = torch.randint(4 + CLASSES, VOCABULARY, (count, TOKENS), generator=generator)
    classes = torch.arange(count) % CLASSES
    ids[:, 1] = 4 + classes
    ids[::2, 4:] = 0
    if target == "tags":
        tags = torch.zeros_like(ids)
        tags[:, 1] = (classes > 0).long()
        return ids, tags.where(ids != 0, IGNORED)
    return ids, classes.float() if target == "score" else classes


def text_dataset(target: Target = "class") -> Dataset:
    """Return 36 training and 12 test texts."""
    generator = torch.Generator().manual_seed(0)
    samples = (*texts(36, target, generator), *texts(12, target, generator))
    facts: dict[str, Any] = {"vocabulary": VOCABULARY, "target": target, "metric": METRICS[target]}
    return Dataset("toy texts", *samples, NAMES[target], (), (), **facts)


def text_runner(method: Method) -> DeviceRunner:
    """Return a runner with three devices of 12 texts each."""
    partition = Partition(torch.arange(36), torch.tensor([0, 12, 24, 36]))
    return DeviceRunner(method, text_dataset(method.task.target), partition)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "un", "##even"]


def write_tokenizer(folder: Path) -> str:
    """Write BERT's tokenizer with nine words, and return its path."""
    pieces = models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[1])
    made = Tokenizer(pieces)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    path = folder / "tokenizer.json"
    made.save(str(path))
    return str(path)


def write_parquet(folder: Path, features: dict[str, Any], **splits: dict[str, list[Any]]) -> str:
    """Write a data set as a folder of parquet files, and return its path."""
    import datasets

    folder.mkdir()
    for split, columns in splits.items():
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)
