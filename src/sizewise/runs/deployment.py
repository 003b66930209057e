"""Deployment: the model for a device, taken out of a run.

    sizewise export runs/mine --memory 20MB --out model.onnx

Of the models that a method hands out, the most accurate one that fits the bytes of inference is
written: as safetensors with a config, as ONNX (checked against torch), or as a `torch.export`
program; and a model card beside it. Batch norms that looked at their test batch in the run get
fixed statistics from the training data: a device that runs one sample at a time has no batch.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sizewise import methods
from sizewise.common.structure import build, format_bytes, nearest, plain
from sizewise.common.threads import one_thread
from sizewise.data.dataset import Dataset
from sizewise.data.memory import check as check_data
from sizewise.data.texts import of_length
from sizewise.engines.device_runner import training_batches
from sizewise.errors import CheckpointError, ConfigError, NothingMerged
from sizewise.exchange import checkpoint
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families.base import Deployed
from sizewise.memory.prediction import predict
from sizewise.models import at_hand
from sizewise.models.memory import Given, understood
from sizewise.runs import card, formats, preparation, provenance, resuming, sample_privacy
from sizewise.runs.folder import RunFolder, Totals
from sizewise.runs.formats import FORMATS, Exported
from sizewise.runs.ledger import Ledger
from sizewise.runs.preparation import Setting
from sizewise.runs.ranking import ranking
from sizewise.surgery import norms
from sizewise.training import evaluation
from sizewise.training.task import Task


@one_thread()  # As in the run, so that what is measured is the same.
def export(
    path: Path,
    out: Path,
    memory: int | None = None,
    size: str | None = None,
    batch: int = 1,
    dataset: Dataset | None = None,
    best: bool = False,
) -> dict[str, Any]:
    """Write the model of a run for a device; return what was written.

    Args:
        path: The run folder.
        out: The file; its ending chooses the format, see `FORMATS`.
        memory: Bytes that inference may take.
        size: Or the name of a deployed size.
        batch: Samples that a device runs at a time.
        dataset: The data the run was started with, if that was given in memory.
        best: Of the round with the best validation score, not of the last one.
    """
    if (memory is None) == (size is None):
        raise ConfigError("give either --memory, the bytes of inference, or --size, a model's name")
    if out.suffix not in FORMATS.values():
        endings = ", ".join(FORMATS.values())
        raise ConfigError(f"--out must end in {endings}, not {out.suffix or str(out)!r}")
    setting = _prepared(path, dataset)
    chosen = _choose(setting, path, memory, size, batch, best)
    out.parent.mkdir(parents=True, exist_ok=True)
    written = formats.write(chosen, setting.method.task, out)
    facts = {
        "size": chosen.size,
        "round": chosen.round,
        "accuracy": chosen.accuracy,
        "metric": setting.method.task.metric,
        "peak_bytes": chosen.peak,
        "budget_bytes": memory,
        "batch": batch,
        "parameters": sum(parameter.numel() for parameter in chosen.module.parameters()),
        "file": str(out),
        "file_bytes": _size(out),
        "difference": written.difference,
        "any_batch": written.any_batch,
        "tokenizer": _write_tokenizer(setting, out),
        "run_dir": str(path),
    }
    whose = {"metadata": plain(chosen.metadata), "owner": chosen.owner}
    description = {**facts, **_description(setting, path), **whose}
    checkpoint.write_bytes(out.with_suffix(".json"), json.dumps(description, indent=1).encode())
    checkpoint.write_bytes(out.with_suffix(".md"), card.markdown(description).encode())
    return facts


@one_thread()
def trained(
    path: Path, size: str | None = None, dataset: Dataset | None = None, best: bool = False
) -> nn.Module:
    """Return a model of a run as `export` would write it, ready to run; nothing is written.

    Args:
        path: The run folder.
        size: The name of a deployed size; default: the main one.
        dataset: The data the run was started with, if that was given in memory.
        best: Of the round with the best validation score, not of the last one.
    """
    setting = _prepared(path, dataset)
    _, totals, models = _trained(setting, path, best)
    chosen = size or ranking(totals.accuracy, totals.sizes)["main"]
    if chosen is None or (size is None and chosen not in models):
        raise ConfigError(
            "the run's accuracy is a mean over several models, so none of them is the main one; "
            f"name a size: {', '.join(models)}"
        )
    return _frozen(setting, _of_size(models, chosen).fill(), calibrate=True)


def _description(setting: Setting, path: Path) -> dict[str, Any]:
    """Return what somebody who has only the file must know."""
    data, chosen = setting.dataset, setting.config
    return {
        "method": {"name": chosen.method.name, **plain(chosen.method.options)},
        "discloses": sorted(setting.method.discloses),
        "privacy": _spent(setting, path),
        "sample_privacy": _spent_on_samples(setting, path),
        "task": plain(setting.method.task),
        "data": {
            "name": data.name,
            "partition": chosen.data.partition,
            "samples": len(data.train_labels),
        },
        "class_names": list(data.class_names),
        "dtype": str(data.train_inputs.dtype),
        "mean": list(data.mean),
        "std": list(data.std),
    }


def _spent(setting: Setting, path: Path) -> dict[str, Any] | None:
    """Return what a private run has spent by now; None if it was none."""
    config = setting.config.privacy
    return None if config is None else Ledger(config, setting.fleet, path).result()


def _spent_on_samples(setting: Setting, path: Path) -> dict[str, Any] | None:
    """Return what single samples have spent by now; None if nothing hides them."""
    config, found = setting.config, RunFolder(path).newest()
    if config.recipe.sample_clip is None or found is None:
        return None
    return sample_privacy.spent(found[1].passes, config.recipe, setting.fleet, config.rounds)


# ---- which model


def _prepared(path: Path, dataset: Dataset | None) -> Setting:
    """Return the setting of a run; its data must be what it was started with."""
    chosen = resuming.read(path)
    # What leaves a run was computed where anybody can: on the host.
    chosen = replace(chosen, engine=replace(chosen.engine, device="cpu"))
    check_data(chosen.data, dataset)
    provenance.check_tokenizer(path, chosen)
    setting = preparation.prepare(chosen, dataset)
    provenance.check(path, setting)
    return setting


def _trained(
    setting: Setting, path: Path, best: bool
) -> tuple[State, Totals, Mapping[str, Deployed]]:
    """Return what a run has come to, or its best round, and the models made of it."""
    found = RunFolder(path).best() if best else RunFolder(path).newest()
    if found is None and best:
        raise CheckpointError(
            f"{str(path)!r} has no best round, as no device validates; export without --best, or "
            f"train with data.validation"
        )
    if found is None:
        raise CheckpointError(f"no round of {str(path)!r} is done yet; there is no model to export")
    state, totals = found
    if totals.failure is not None:
        raise NothingMerged(f"{str(path)!r} has no model to export: {totals.failure}")
    return state, totals, setting.method.deploy(state)


def _of_size(models: Mapping[str, Deployed], size: str) -> Deployed:
    if size not in models:
        raise ConfigError(f"the run has no size {size!r}; {nearest(size, models)}")
    return models[size]


def _choose(
    setting: Setting, path: Path, memory: int | None, size: str | None, batch: int, best: bool
) -> Exported:
    state, totals, models = _trained(setting, path, best)
    if size is not None:
        return _exported(setting, (state, totals), size, _of_size(models, size), batch)
    # The most accurate first, as the run measured it: the search ends with the first that fits.
    ranked = sorted(models, key=lambda name: -totals.sizes.get(name, 0.0))
    peaks = {}
    for name in ranked:
        module = _frozen(setting, models[name].fill(), calibrate=False)
        peaks[name] = _peak(module, setting.method.task, batch)
        if memory is not None and peaks[name] <= memory:
            return _exported(setting, (state, totals), name, models[name], batch)
    least = min(peaks, key=lambda name: peaks[name])
    raise ConfigError(
        f"no model of the run fits {format_bytes(memory or 0)}: {least!r} needs {peaks[least]:,} "
        f"bytes for a batch of {batch}; give at least that, or train with smaller budgets"
    )


def _exported(
    setting: Setting, found: tuple[State, Totals], size: str, model: Deployed, batch: int
) -> Exported:
    module = _frozen(setting, model.fill(), calibrate=True)
    data, recipe = setting.dataset, setting.config.recipe
    scores = evaluation.score(module, data, recipe.eval_batch)
    return Exported(
        size,
        module,
        # Where silos have labels of their own, the mean over them.
        fmean(evaluation.total(scores).values(data.metric, data.sets)),
        _peak(module, setting.method.task, batch),
        batch,
        found[0].metadata,
        model.owner,
        found[1].rounds,
        frozenset(found[0].tensors),
    )


def _frozen(setting: Setting, module: nn.Module, calibrate: bool) -> nn.Module:
    """Return a copy that gives each sample its own result, whatever batch it comes in."""
    module = copy.deepcopy(module).eval()
    if norms.uses_batch_statistics(module):
        batches = _calibrating(setting)
        module = norms.recalibrate(module, batches if calibrate else ())
    return module.requires_grad_(False)


def _calibrating(setting: Setting) -> Iterator[Tensor]:
    """Return what norms get their statistics from: training data, unless that is private."""
    data, batch = setting.dataset, setting.config.recipe.eval_batch
    if setting.config.privacy is None:
        return training_batches(data, batch, setting.partition.held_out())
    return (data.transform()(inputs, None) for inputs in torch.split(data.test_inputs, batch))


def _peak(module: nn.Module, task: Task, batch: int) -> int:
    return predict(module, task.inputs(batch), training=False).peak


# ---- beside it


def _size(out: Path) -> int:
    files = out.rglob("*") if out.is_dir() else [out]
    return sum(path.stat().st_size for path in files)


def _write_tokenizer(setting: Setting, out: Path) -> str | None:
    """Write what makes token ids of texts, of the length that the model takes; return where.

    None for images, and for token ids that were given in memory by a tokenizer nobody named.
    """
    stored = provenance.tokenizer_in(setting)
    if not stored:
        return None
    path = out.with_suffix(".tokenizer.json")
    checkpoint.write_bytes(path, of_length(stored, setting.dataset.shape[0]).encode())
    return str(path)


# ---- the way back


def load(path: str | Path, model: object = None) -> nn.Module:
    """Return the model that was exported as safetensors, ready to run; its config is beside it.

    Args:
        path: The file.
        model: What the run was given as its model, if that cannot be imported by its name.
    """
    path, given = Path(path), None if model is None else understood(model)
    try:
        facts: Mapping[str, Any] = json.loads(path.with_suffix(".json").read_text())
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a model that `sizewise export` wrote, with its .json beside it: "
            f"{error}"
        ) from None
    if "metadata" not in facts:
        raise CheckpointError(
            f"{str(path)!r} was exported by an older sizewise, which kept other facts beside it; "
            f"load it with that version, or export it again"
        )
    task = build(Task, facts["task"])
    with at_hand(task.model.name, given.make) if isinstance(given, Given) else nullcontext():
        return _filled(task, facts, tensors)


def _filled(task: Task, facts: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    """Return the model of a size with these tensors in it."""
    if task.model.sha256 is not None:
        preparation.check_model(task)
    options = dict(facts["method"])
    kind = methods.find(options.pop("name"))
    method = kind(task, build(kind.Options, options, "method"))
    # A state in which the model has its size; its tensors come from the file.
    owners: dict[int, dict[str, Tensor]] = {} if facts["owner"] is None else {facts["owner"]: {}}
    state = replace(method.setup(), metadata=facts["metadata"], devices=owners)
    module = copy.deepcopy(method.deploy(state)[facts["size"]].fill())
    if norms.uses_batch_statistics(module):
        module = norms.recalibrate(module, ())
    module.load_state_dict(tensors, strict=False)
    return module.eval().requires_grad_(False)
