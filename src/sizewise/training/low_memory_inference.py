"""Inference within a budget: part by part, with activations and weights in files.

A device that trains a model block by block should also be able to run it. `LowMemoryInference`
looks like the model, but holds only one of its parts at a time; what the part makes of a batch goes
to a file, from which the next part reads. Where a sample's result does not depend on the batch it
is in, a part works on as few samples at a time as the budget asks for.
"""

import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from sizewise.errors import BudgetTooSmall
from sizewise.memory.prediction import Meter, predict
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.norms import uses_batch_statistics
from sizewise.torch_tools.dry_run import MetaMode, on_meta
from sizewise.training import buffering
from sizewise.training.loop import own_tensors, unsaved_buffers


class LowMemoryInference(nn.Module):
    """A model that runs within a budget.

    Attributes:
        peak: The most bytes that were alive so far: weights of a part, and its activations.
        chunk: Samples that a part works on at a time.
    """

    def __init__(self, model: nn.Module, parts: Anatomy, inputs: Tensor, budget: int) -> None:
        """Write a model's weights to a file, and find out how it fits the budget, in bytes.

        The model is not needed any more afterwards. The inputs have the shape and type of the
        largest batch that comes.

        Raises:
            BudgetTooSmall: Some part does not fit even with one sample, or, where norms look at
                the batch, with the whole batch.
        """
        super().__init__()
        self.peak = 0
        self._folder = tempfile.TemporaryDirectory()
        self._weights = Path(self._folder.name, "weights.safetensors")
        own = {name: tensor.detach().contiguous() for name, tensor in own_tensors(model).items()}
        save_file(own, self._weights)
        paths = (*parts.stem, *parts.blocks, *parts.head)
        self._budget, self._paths = budget, paths
        self._unsaved = [unsaved_buffers(model.get_submodule(path)) for path in paths]
        # In a list, so that they are not this module's children: they have no tensors.
        self._skeletons = [on_meta(model.get_submodule(path)) for path in paths]
        self.chunk = self._fitting(model, inputs)

    def _fitting(self, model: nn.Module, inputs: Tensor) -> int:
        whole = uses_batch_statistics(model)
        chunk = len(inputs)
        while (needed := self._need(model, inputs[:chunk])) > self._budget:
            if whole or chunk == 1:
                what = f"running the largest part of the model on {chunk} samples"
                raise BudgetTooSmall(self._budget, needed, what)
            chunk = (chunk + 1) // 2
        return chunk

    def _need(self, model: nn.Module, chunk: Tensor) -> int:
        hidden, most = torch.empty_like(chunk, device="meta"), 0
        for path, skeleton in zip(self._paths, self._skeletons, strict=True):
            footprint = predict(model.get_submodule(path), hidden, training=False)
            most = max(most, footprint.peak)
            with torch.no_grad(), MetaMode():
                hidden = torch.empty_like(skeleton(hidden), memory_format=torch.contiguous_format)
        return most

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of a batch."""
        bounds = tuple((i, min(i + self.chunk, len(x))) for i in range(0, len(x), self.chunk))
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            labels = torch.zeros(len(x), dtype=torch.int64)
            buffer = buffering.Buffer(x, labels, bounds, Path(folder), in_memory=False)
            for path, skeleton, rest in zip(
                self._paths, self._skeletons, self._unsaved, strict=True
            ):
                tensors = self._load(path, skeleton) | rest

                def run(
                    chunk: Tensor, part: nn.Module = skeleton, own: dict[str, Tensor] = tensors
                ) -> Tensor:
                    with Meter(self._budget) as meter:
                        meter.track(own, chunk)
                        out: Tensor = functional_call(part, own, (chunk,))
                    self.peak = max(self.peak, meter.peak)
                    return out

                buffer = buffer.through(self, run, room=0)
            return buffer.inputs.clone()

    def _load(self, path: str, skeleton: nn.Module) -> dict[str, Tensor]:
        with safe_open(self._weights, framework="pt") as weights:
            return {
                name: weights.get_tensor(f"{path}.{name}")
                for name in skeleton.state_dict()
                if f"{path}.{name}" in weights.keys()  # noqa: SIM118  (it is not a mapping)
            }
