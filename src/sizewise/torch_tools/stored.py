"""Frozen weights in fewer bytes: in bfloat16, or in int8 with a scale for each row.

A layer's weight rests as it is stored. For the moment in which the layer runs, forward or backward,
it is turned into float32, so all arithmetic is that of float32 and only the rounding of the weights
is lost. Linear layers and embeddings are stored like this; biases and norms, which weigh next to
nothing, stay as they are.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Stored = Literal["float32", "bf16", "int8"]

STEPS = 127
"""Steps of int8 from zero to the largest entry of a row."""


def packed(weight: Tensor, kind: Stored) -> tuple[Tensor, Tensor | None]:
    """Return a matrix (rows, columns) as it is stored; of int8 the rows' scales, (rows, 1)."""
    if kind == "bf16":
        return weight.bfloat16(), None
    scale = weight.abs().amax(1, keepdim=True) / STEPS
    steps = (weight / scale.clamp(min=torch.finfo(weight.dtype).tiny)).round()
    return steps.to(torch.int8), scale


def unpacked(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the float32 matrix (rows, columns) that is stored; in place, as it may be large."""
    return stored.float() if scale is None else stored.float().mul_(scale)


class _Product(torch.autograd.Function):
    """x W^T for a stored W, which is turned into float32 once for each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor | None) -> Tensor:
        """Map (..., columns) to (..., rows)."""
        ctx.save_for_backward(stored, scale)
        return F.linear(x, unpacked(stored, scale))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Map the gradient of the output to that of the input; nothing else learns."""
        stored, scale = ctx.saved_tensors
        return gradient @ unpacked(stored, scale), None, None


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight is stored; `scale` are the steps of its rows."""

    scale: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        product: Tensor = _Product.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias

    @property
    def plain(self) -> nn.Linear:
        """The same layer with a weight in float32."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        layer.weight = nn.Parameter(unpacked(self.weight, self.scale), requires_grad=False)
        layer.bias = self.bias
        return layer


class StoredEmbedding(nn.Embedding):
    """A frozen embedding whose table is stored."""

    scale: Tensor | None

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (...) to vectors (..., size)."""
        rows = F.embedding(ids, self.weight, self.padding_idx)
        return unpacked(rows, None if self.scale is None else F.embedding(ids, self.scale))

    @property
    def plain(self) -> nn.Embedding:
        """The same layer with a table in float32."""
        size = (self.num_embeddings, self.embedding_dim)
        layer = nn.Embedding(*size, padding_idx=self.padding_idx, device="meta")
        layer.weight = nn.Parameter(unpacked(self.weight, self.scale), requires_grad=False)
        return layer


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StoredLinear,
    nn.Embedding: StoredEmbedding,
}


def store(module: nn.Module, kind: Stored) -> None:
    """Store the weights of a model's frozen linear layers and embeddings, in place.

    Tied ones stay tied. Layers of classes derived from these compute something of their own, and
    are left alone.
    """
    done: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
    for layer in module.modules() if kind != "float32" else ():
        if type(layer) not in _KINDS:
            continue
        weight: Any = layer.weight
        if weight.requires_grad:
            continue
        if id(weight) not in done:
            steps, scale = packed(weight.detach(), kind)
            done[id(weight)] = nn.Parameter(steps, requires_grad=False), scale
        kept, scale = done[id(weight)]
        layer.__class__ = _KINDS[type(layer)]
        layer.weight = kept
        layer.register_buffer("scale", scale, persistent=False)


def restore(module: nn.Module) -> None:
    """Give stored layers their weights in float32 again, in place; tied ones stay tied."""
    done: dict[int, Tensor] = {}
    for path, layer in list(module.named_modules()):
        if isinstance(layer, StoredLinear | StoredEmbedding):
            plain = layer.plain
            plain.weight = done.setdefault(id(layer.weight), plain.weight)
            module.set_submodule(path, plain)
