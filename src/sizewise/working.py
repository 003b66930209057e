"""A working copy: one model for each size and process, used by device after device.

Building a model for every device would cost more than training a small one. What a device leaves
behind must not reach the next: tensors are loaded anew, and buffers that are not saved with the
model are put back. Plain attributes that a model changes in its forward pass are its own business.
"""

from dataclasses import replace

import torch
from torch import nn

from sizewise.plan import Stage
from sizewise.training import learns, own_tensors
from sizewise.view import Tensors


class WorkingCopy:
    """A model, and what has to be known of it as it was built.

    Attributes:
        module: The model; valid for one user at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = module.named_parameters()
        self._frozen = frozenset(name for name, p in named if not p.requires_grad)
        saved = module.state_dict()
        buffers = module.named_buffers()
        self._unsaved = {name: (b, b.clone()) for name, b in buffers if name not in saved}

    @torch.no_grad()
    def load(self, tensors: Tensors) -> nn.Module:
        """Fill the model with all its tensors, by name, and return it."""
        for name, tensor in own_tensors(self.module).items():
            tensor.copy_(tensors[name])
        for buffer, value in self._unsaved.values():
            buffer.copy_(value)
        return self.module

    def actual(self, stage: Stage) -> Stage:
        """Return a stage without the parameters that the model's owner keeps frozen."""
        if not self._frozen:
            return stage
        names = (name for name, _ in self.module.named_parameters() if name not in self._frozen)
        return replace(stage, trainable=tuple(n for n in names if learns(n, stage.trainable)))
