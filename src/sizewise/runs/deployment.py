"""Deployment: the model for a device, taken out of a run.

    sizewise export runs/mine --memory 20MB --out model.onnx

Of the models that a method hands out, the most accurate one that fits the bytes of inference is
written: as safetensors with a config, as ONNX (checked against torch), or as a `torch.export`
program; and a model card beside it. Batch norms that looked at their test batch in the run get
fixed statistics from the training data: a device that runs one sample at a time has no batch.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sizewise import methods
from sizewise.common.structure import build, format_bytes, nearest, plain
from sizewise.common.threads import one_thread
from sizewise.data.dataset import Dataset
from sizewise.data.memory import check as check_data
from sizewise.data.texts import own_tokenizer, set_length, tokenizer
from sizewise.engines.device_runner import training_batches
from sizewise.errors import CheckpointError, ConfigError, NothingMerged
from sizewise.exchange import checkpoint
from sizewise.exchange.state import State
from sizewise.families.base import Deployed
from sizewise.memory.prediction import predict
from sizewise.runs import card, preparation, resuming
from sizewise.runs.folder import RunFolder
from sizewise.runs.preparation import Setting
from sizewise.surgery import norms
from sizewise.training import evaluation
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}
"""Formats and the endings of their files."""

TOLERANCE = 1e-4
"""How far logits of an ONNX model may be from torch's."""

COMPARED = 8
"""Batches of noise on which a file is compared with the model that it was made from."""


@dataclass(frozen=True)
class Exported:
    """A model that is ready to leave its run.

    Attributes:
        size: Its name among the sizes of the method.
        module: The model, in evaluation mode.
        accuracy: On the test set, as it is exported; or what the metric of the data says.
        peak: Bytes of inference at their peak, predicted, for a batch of `batch`.
        batch: Samples at a time.
        metadata: What the run's state says of its sizes.
        owner: The device whose memory it was made from, if that is one.
    """

    size: str
    module: nn.Module
    accuracy: float
    peak: int
    batch: int
    metadata: Mapping[str, Any]
    owner: int | None


@one_thread()  # As in the run, so that what is measured is the same.
def export(
    path: Path,
    out: Path,
    memory: int | None = None,
    size: str | None = None,
    batch: int = 1,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Write the model of a run for a device; return what was written.

    Args:
        path: The run folder.
        out: The file; its ending chooses the format, see `FORMATS`.
        memory: Bytes that inference may take.
        size: Or the name of a deployed size.
        batch: Samples that a device runs at a time.
        dataset: The data the run was started with, if that was given in memory.
    """
    writers: dict[str, Callable[[Exported, Task, Path], float | None]] = {
        ".safetensors": _write_safetensors,
        ".onnx": _write_onnx,
        ".pt2": _write_program,
    }
    if (memory is None) == (size is None):
        raise ConfigError("give either --memory, the bytes of inference, or --size, a model's name")
    if out.suffix not in writers:
        raise ConfigError(f"--out must end in {', '.join(writers)}, not {out.suffix or str(out)!r}")
    setting = _prepared(path, dataset)
    chosen = _choose(setting, path, memory, size, batch)
    out.parent.mkdir(parents=True, exist_ok=True)
    difference = writers[out.suffix](chosen, setting.method.task, out)
    facts = {
        "size": chosen.size,
        "accuracy": chosen.accuracy,
        "metric": setting.method.task.metric,
        "peak_bytes": chosen.peak,
        "budget_bytes": memory,
        "batch": batch,
        "parameters": sum(parameter.numel() for parameter in chosen.module.parameters()),
        "file": str(out),
        "file_bytes": out.stat().st_size,
        "difference": difference,
        "tokenizer": _write_tokenizer(setting, out),
        "run_dir": str(path),
    }
    whose = {"metadata": plain(chosen.metadata), "owner": chosen.owner}
    description = {**facts, **_description(setting), **whose}
    checkpoint.write_bytes(out.with_suffix(".json"), json.dumps(description, indent=1).encode())
    checkpoint.write_bytes(out.with_suffix(".md"), card.markdown(description).encode())
    return facts


def _description(setting: Setting) -> dict[str, Any]:
    """Return what somebody who has only the file must know."""
    data, chosen = setting.dataset, setting.config
    return {
        "method": {"name": chosen.method.name, **plain(chosen.method.options)},
        "discloses": sorted(setting.method.discloses),
        "task": plain(setting.method.task),
        "data": {
            "name": data.name,
            "partition": chosen.data.partition,
            "samples": len(data.train_labels),
        },
        "class_names": list(data.class_names),
        "mean": list(data.mean),
        "std": list(data.std),
    }


# ---- which model


def _prepared(path: Path, dataset: Dataset | None) -> Setting:
    """Return the setting of a run; its data must be what it was started with."""
    chosen = resuming.read(path)
    # What leaves a run was computed where anybody can: on the host.
    chosen = replace(chosen, engine=replace(chosen.engine, device="cpu"))
    check_data(chosen.data, dataset)
    setting = preparation.prepare(chosen, dataset)
    described = json.loads((path / "partition.json").read_text(encoding="utf-8"))
    if described["data_sha256"] != setting.dataset.fingerprint():
        raise CheckpointError(
            f"the data is not what {str(path)!r} was started with; "
            f"restore {setting.config.data.name!r}, or give the data that was in memory"
        )
    return setting


def _choose(
    setting: Setting, path: Path, memory: int | None, size: str | None, batch: int
) -> Exported:
    found = RunFolder(path).newest()
    if found is None:
        raise CheckpointError(f"no round of {str(path)!r} is done yet; there is no model to export")
    state, totals = found
    if totals.failure is not None:
        raise NothingMerged(f"{str(path)!r} has no model to export: {totals.failure}")
    models = setting.method.deploy(state)
    if size is not None:
        if size not in models:
            raise ConfigError(f"the run has no size {size!r}; {nearest(size, models)}")
        return _exported(setting, state, size, models[size], batch)
    # The most accurate first, as the run measured it: the search ends with the first that fits.
    ranked = sorted(models, key=lambda name: -totals.sizes.get(name, 0.0))
    peaks = {}
    for name in ranked:
        module = _frozen(setting, models[name].fill(), calibrate=False)
        peaks[name] = _peak(module, setting.method.task, batch)
        if memory is not None and peaks[name] <= memory:
            return _exported(setting, state, name, models[name], batch)
    least = min(peaks, key=lambda name: peaks[name])
    raise ConfigError(
        f"no model of the run fits {format_bytes(memory or 0)}: {least!r} needs {peaks[least]:,} "
        f"bytes for a batch of {batch}; give at least that, or train with smaller budgets"
    )


def _exported(setting: Setting, state: State, size: str, model: Deployed, batch: int) -> Exported:
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
        state.metadata,
        model.owner,
    )


def _frozen(setting: Setting, module: nn.Module, calibrate: bool) -> nn.Module:
    """Return a copy that gives each sample its own result, whatever batch it comes in."""
    module = copy.deepcopy(module).eval()
    if norms.uses_batch_statistics(module):
        batches = training_batches(setting.dataset, setting.config.recipe.eval_batch)
        module = norms.recalibrate(module, batches if calibrate else ())
    return module.requires_grad_(False)


def _peak(module: nn.Module, task: Task, batch: int) -> int:
    return predict(module, task.inputs(batch), training=False).peak


# ---- the formats


def _write_safetensors(chosen: Exported, task: Task, out: Path) -> None:
    own = {
        name: tensor.detach().contiguous() for name, tensor in own_tensors(chosen.module).items()
    }
    save_file(own, out, metadata={"size": chosen.size})


def _write_program(chosen: Exported, task: Task, out: Path) -> float:
    batch = torch.export.Dim("batch", min=1, max=4096)
    several = task.drawn(max(2, chosen.batch))
    with _quiet():
        program = torch.export.export(chosen.module, (several,), dynamic_shapes=({0: batch},))
        torch.export.save(program, out)
    return _largest_difference(chosen, program.module(), task)


def _write_onnx(chosen: Exported, task: Task, out: Path) -> float:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (what torch exports with)
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs {error.name}; install it with: pip install 'sizewise[onnx]'"
        ) from None
    with _quiet():
        torch.onnx.export(
            chosen.module,
            (task.drawn(chosen.batch),),
            out,
            input_names=["inputs"],
            output_names=["logits"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    running = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])

    def run(inputs: Tensor) -> Tensor:
        (logits,) = running.run(None, {"inputs": inputs.numpy()})
        return torch.from_numpy(logits)

    difference = _largest_difference(chosen, run, task)
    if not difference <= TOLERANCE:
        out.unlink()
        raise ConfigError(
            f"the ONNX model's logits differ from torch's by {difference:.3g}, more than "
            f"{TOLERANCE:g}; export it as safetensors or .pt2 instead"
        )
    return difference


def _write_tokenizer(setting: Setting, out: Path) -> str | None:
    """Write what makes token ids of texts, of the length that the model takes; return where.

    None for images, and for token ids that were given in memory by a tokenizer nobody named.
    """
    data, chosen = setting.dataset, setting.config
    name = chosen.data.tokenizer or own_tokenizer(chosen.model.weights)
    if not data.vocabulary or name is None:
        return None
    tokens = tokenizer(name)
    if tokens.get_vocab_size() != data.vocabulary:
        return None
    set_length(data.name, tokens, data.shape[0])
    path = out.with_suffix(".tokenizer.json")
    checkpoint.write_bytes(path, tokens.to_str(pretty=True).encode())
    return str(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own warnings, about itself and packages that nobody asked for, to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def _largest_difference(chosen: Exported, other: Callable[[Tensor], Tensor], task: Task) -> float:
    """Return how far two models are from each other on some random inputs."""
    differences = (
        (chosen.module(inputs) - other(inputs)).abs().max()
        for inputs in torch.split(task.drawn(COMPARED * chosen.batch), chosen.batch)
    )
    return float(max(differences))


# ---- the way back


def load(path: Path) -> nn.Module:
    """Return the model that was exported as safetensors, ready to run; its config is beside it."""
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
    options = dict(facts["method"])
    kind = methods.find(options.pop("name"))
    method = kind(build(Task, facts["task"]), build(kind.Options, options, "method"))
    # A state in which the model has its size; its tensors come from the file.
    owners: dict[int, dict[str, Tensor]] = {} if facts["owner"] is None else {facts["owner"]: {}}
    state = replace(method.setup(), metadata=facts["metadata"], devices=owners)
    module = copy.deepcopy(method.deploy(state)[facts["size"]].fill())
    if norms.uses_batch_statistics(module):
        module = norms.recalibrate(module, ())
    module.load_state_dict(tensors, strict=False)
    return module.eval().requires_grad_(False)
