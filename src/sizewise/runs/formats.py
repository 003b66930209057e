"""The files that an exported model is written to, by their endings.

Safetensors, ONNX, a `torch.export` program, and folders of peft and of transformers. What can be
run without sizewise is run, and compared with the model that it was made from.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sizewise.errors import ConfigError
from sizewise.runs import adapter_files
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

FORMATS = {
    "safetensors": ".safetensors",
    "onnx": ".onnx",
    "torch": ".pt2",
    "peft": ".peft",
    "transformers": ".transformers",
}
"""Formats and the endings of their files; the last two are folders."""

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
        round: The round that it is from.
        learned: The names of the tensors that the run has trained.
    """

    size: str
    module: nn.Module
    accuracy: float
    peak: int
    batch: int
    metadata: Mapping[str, Any]
    owner: int | None
    round: int
    learned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Written:
    """What is known of a file.

    Attributes:
        difference: How far its logits are from the model's; None if it is only its tensors.
        any_batch: Whether it takes any number of samples at a time, or those of `batch` only.
    """

    difference: float | None = None
    any_batch: bool = True


def write(chosen: Exported, task: Task, out: Path) -> Written:
    """Write a model in the format of a file's ending."""
    writers: dict[str, Callable[[Exported, Task, Path], Written]] = {
        ".safetensors": _write_safetensors,
        ".onnx": _write_onnx,
        ".pt2": _write_program,
        ".peft": _write_adapters,
        ".transformers": _write_merged,
    }
    return writers[out.suffix](chosen, task, out)


def _write_safetensors(chosen: Exported, task: Task, out: Path) -> Written:
    own = {
        name: tensor.detach().contiguous() for name, tensor in own_tensors(chosen.module).items()
    }
    save_file(own, out, metadata={"size": chosen.size})
    return Written()


def _write_adapters(chosen: Exported, task: Task, out: Path) -> Written:
    with _quiet():
        base = task.model.weights or ""
        read = adapter_files.write_adapters(chosen.module, chosen.learned, base, out)
        return Written(_largest_difference(chosen, read, task))


def _write_merged(chosen: Exported, task: Task, out: Path) -> Written:
    with _quiet():
        read = adapter_files.write_merged(chosen.module, out)
        return Written(_largest_difference(chosen, read, task))


def _any_batch(chosen: Exported, task: Task) -> tuple[Tensor, tuple[dict[int, Any]]]:
    """Return a batch to export with, and the dimensions of it that may be others."""
    dimension = torch.export.Dim("batch", min=1, max=4096)
    return task.drawn(max(2, chosen.batch)), ({0: dimension},)


def _write_program(chosen: Exported, task: Task, out: Path) -> Written:
    several, shapes = _any_batch(chosen, task)
    with _quiet():
        try:
            program = torch.export.export(chosen.module, (several,), dynamic_shapes=shapes)
        except Exception as error:  # It may stumble over anything, such as a model left early.
            raise ConfigError(
                f"torch.export cannot follow {chosen.size!r} ({type(error).__name__}); export it "
                "as safetensors or .onnx instead"
            ) from error
        torch.export.save(program, out)
    return Written(_largest_difference(chosen, program.module(), task))


def _write_onnx(chosen: Exported, task: Task, out: Path) -> Written:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (what torch exports with)
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs {error.name}; install it with: pip install 'sizewise[onnx]'"
        ) from None

    def export(inputs: Tensor, shapes: tuple[dict[int, Any]] | None) -> None:
        with _quiet():
            torch.onnx.export(
                chosen.module,
                (inputs,),
                out,
                input_names=["inputs"],
                output_names=["logits"],
                dynamic_shapes=shapes,
                dynamo=True,
                external_data=False,
                verbose=False,
            )

    any_batch = True
    try:
        export(*_any_batch(chosen, task))
    except torch.onnx.OnnxExporterError:  # It cannot follow a number that it does not know.
        any_batch = False
        export(task.drawn(chosen.batch), None)
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
    return Written(difference, any_batch)


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
