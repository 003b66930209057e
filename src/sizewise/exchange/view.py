"""Views: where a device's tensors live among the server's tensors.

A view maps each tensor that a device holds to a slice: a server tensor and, for each dimension,
which entries of it. `cut` reads a device's tensors through a view; `merge` writes them back through
the same view. Everything that methods do to a model (narrow it, drop blocks, keep some tensors
apart for each size) is a choice of slices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sizewise.errors import UpdateRefused

Tensors = Mapping[str, Tensor]
Index = tuple["slice | Tensor", ...]
"""For each dimension, the kept entries: a slice, or a 1-D int64 tensor in the device's order.

No entry is listed twice; `merge` relies on that.
"""


@dataclass(frozen=True)
class TensorSlice:
    """A place in the server's tensors.

    Attributes:
        name: The server tensor's name.
        index: Its kept entries per dimension; None is the whole tensor.
    """

    name: str
    index: Index | None = None

    def read(self, tensors: Tensors) -> Tensor:
        """Return the entries of this slice: the tensor itself, a strided view, or a copy."""
        entries = tensors[self.name]
        if self.index is None:
            return entries
        entries = entries[slices(self.index)]
        # One dimension after the other is several times faster than one index over all of them.
        for dim, part in enumerate(self.index):
            if isinstance(part, Tensor):
                entries = entries.index_select(dim, part)
        return entries

    def shape(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the shape of what `read` gives, without reading it."""
        sizes = tensors[self.name].shape
        if self.index is None:
            return tuple(sizes)
        return tuple(
            len(range(size)[part]) if isinstance(part, slice) else len(part)
            for part, size in zip(self.index, sizes, strict=True)
        )


View = Mapping[str, TensorSlice]
"""A device's tensor names and the slices they fill."""


def slices(index: Index) -> tuple[slice, ...]:
    """Return the sliced dimensions of an index alone; dimensions that list entries are whole."""
    return tuple(part if isinstance(part, slice) else slice(None) for part in index)


def grid(index: Index, shape: torch.Size) -> tuple["slice | Tensor", ...]:
    """Return an index that selects the outer product of the entries kept in each dimension.

    Slices alone stay slices, so reading is a view and writing is one strided pass. As soon as one
    dimension lists its entries, all do, each shaped to broadcast against the others.
    """
    if all(isinstance(part, slice) for part in index):
        return index
    rank = len(index)
    return tuple(
        (torch.arange(size)[part] if isinstance(part, slice) else part).reshape(
            [-1 if d == dim else 1 for d in range(rank)]
        )
        for dim, (part, size) in enumerate(zip(index, shape, strict=True))
    )


def whole(names: Mapping[str, object] | list[str]) -> dict[str, TensorSlice]:
    """Return the view of a device that holds these tensors entirely, under the same names."""
    return {name: TensorSlice(name) for name in names}


def cut(tensors: Tensors, view: View) -> dict[str, Tensor]:
    """Return a device's tensors by their local names; whole tensors are not copied."""
    return {local: place.read(tensors) for local, place in view.items()}


def size_in_bytes(tensors: Tensors) -> int:
    """Return what these tensors weigh on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def view_in_bytes(view: View, tensors: Tensors) -> int:
    """Return what a view's tensors weigh on the wire, without cutting them."""
    return sum(
        math.prod(place.shape(tensors)) * tensors[place.name].element_size()
        for place in view.values()
    )


def check(update: Tensors, view: View, tensors: Tensors) -> None:
    """Raise UpdateRefused unless an update's tensors fit the view it was asked for and are finite.

    Args:
        update: What a device sent, by local name; it may leave tensors out, but not add any.
        view: The view its plan gave it.
        tensors: The server's tensors.
    """
    for local, tensor in update.items():
        if local not in view:
            raise UpdateRefused(f"tensor {local!r} was never sent to this device")
        place = view[local]
        _check_tensor(local, tensor, place.shape(tensors), tensors[place.name].dtype)


def check_sample_payload(shared: Tensors, expected: Tensors) -> None:
    """Raise UpdateRefused unless a device shares just what it was asked for, and that is finite.

    Args:
        shared: What a device sent beside its tensors, by name.
        expected: Tensors of the right types and shapes; on the meta device will do.
    """
    if odd := sorted(shared.keys() ^ expected.keys()):
        what = "was not asked for" if odd[0] in shared else "was asked for and did not come"
        raise UpdateRefused(f"{odd[0]!r} {what}")
    for name, tensor in shared.items():
        _check_tensor(name, tensor, tuple(expected[name].shape), expected[name].dtype)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != kind:
        raise UpdateRefused(
            f"tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"expected {kind} of shape {shape}"
        )
    # A sum is finite only if every entry is (or if huge values cancel, which is as bad).
    if tensor.is_floating_point() and not math.isfinite(tensor.sum()):
        raise UpdateRefused(
            f"tensor {name!r} holds values that are not finite; lower recipe.lr or set recipe.clip"
        )
