"""A working copy: one model for each size and process, used by device after device.

Building a model for every device would cost more than training a small one, and so would walking
through all its layers. What a device leaves behind must not reach the next: tensors are loaded
anew, and buffers that are not saved with the model are put back. Plain attributes that a model
changes in its forward pass are its own business.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sizewise.exchange.plan import TrainingStage
from sizewise.exchange.view import Tensors
from sizewise.torch_tools.placement import HOST, placed, taken_out
from sizewise.training.loop import freeze, learns, own_tensors, trained_names, unsaved_buffers

Names = tuple[str, ...] | None


class WorkingCopy:
    """A model, and what has to be known of it as it was built.

    It is in host memory until it is loaded, and again when it is released.

    Attributes:
        module: The model; valid for one user at a time.
        tensors: Its parameters and buffers by name; tied ones once, and those that it holds for
            good not at all.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device = HOST,
        held: frozenset[str] = frozenset(),
    ) -> None:
        """Take a model in host memory that will work on a device, and what it holds for good."""
        self._built, self._device, self._held = module, device, held
        # What was found out about its names: a cache, never a result.
        self._trained: dict[tuple[Names, ...], list[str]] = {}
        self._hold(module)

    def _hold(self, module: nn.Module) -> None:
        self.module = module
        self.tensors = {n: t for n, t in own_tensors(module).items() if n not in self._held}
        named = dict(module.named_parameters())
        self._parameters = list(named.values())
        self._frozen = frozenset(name for name, p in named.items() if not p.requires_grad)
        self._unsaved = [(b, taken_out(b)) for b in unsaved_buffers(module).values()]
        # What was found out about the layers: a cache, never a result.
        self._ready: tuple[Names, list[nn.Parameter]] | None = None

    @torch.no_grad()
    def load(self, tensors: Tensors) -> nn.Module:
        """Fill the model with its tensors, by name, and return it, on its device."""
        if self._device != HOST and self.module is self._built:
            self._hold(placed(self._built, self._device))
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
        for buffer, value in self._unsaved:
            buffer.copy_(value)
        return self.module

    def release(self) -> None:
        """Let go of the device's memory; what is there is lost."""
        if self.module is not self._built:
            self._hold(self._built)

    def actual(self, stage: TrainingStage) -> TrainingStage:
        """Return a stage without the parameters that the model's owner keeps frozen."""
        if not self._frozen:
            return stage
        names = (name for name, _ in self.module.named_parameters() if name not in self._frozen)
        return replace(stage, trainable=tuple(n for n in names if learns(n, stage.trainable)))

    def ready(self, stage: TrainingStage) -> list[nn.Parameter]:
        """Let the model learn what a stage trains, and return those parameters."""
        # Evaluation in between has put the model, and all its parts, into another mode.
        if self._ready is None or self._ready[0] != stage.trainable or not self.module.training:
            self.module.train()
            self._ready = stage.trainable, freeze(self.module, stage.trainable)
        for parameter in self._parameters:
            parameter.grad = None
        return self._ready[1]

    def trained(self, stages: Sequence[TrainingStage]) -> dict[str, Tensor]:
        """Return copies of what some stage trained, in host memory.

        Frozen tensors are left out: they are not sent and do not count as covered.
        """
        return {name: taken_out(self.tensors[name]) for name in self.trained_names(stages)}

    def trained_names(self, stages: Sequence[TrainingStage]) -> list[str]:
        """Return the names of what some stage trains: its parameters, and buffers beside them."""
        key = tuple(stage.trainable for stage in stages)
        if key not in self._trained:
            self._trained[key] = trained_names(self.module, stages)
        return self._trained[key]
