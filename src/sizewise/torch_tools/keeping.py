"""How tensors wait between the forward pass and the backward pass: as they are, or in bfloat16."""

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from sizewise.errors import ModelError
from sizewise.torch_tools.hollow import room_of

SMALL = 4096
"""Elements up to which a tensor is left in float32.

Rounding it would save next to nothing, and the statistics of norms are mostly below.
"""


class Keeper(Protocol):
    """Puts tensors away and gives them back, as `torch.autograd.graph.saved_tensors_hooks` asks."""

    def pack(self, tensor: Tensor) -> Any:
        """Return what stands for a tensor until it is needed."""
        ...

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that something stands for."""
        ...


class AsItIs:
    """Keeps tensors as they are."""

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return the tensor without its history, which would hold what holds it, and its age."""
        return tensor.detach(), tensor._version

    def unpack(self, kept: tuple[Tensor, int]) -> Tensor:
        """Return the tensor, if nobody changed it; torch cannot tell behind a hook."""
        tensor, version = kept
        if tensor._version != version:
            raise ModelError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed "
                "in place meanwhile; compute a new one, or train without levers"
            )
        return tensor


class InHalf:
    """Keeps large float32 tensors in bfloat16, each only once however many operations save it.

    Tensors that stay alive anyway, such as parameters, are kept as they are: a copy would be
    bytes more.
    """

    def __init__(self, alive: Iterable[Tensor]) -> None:
        """Begin a step.

        Args:
            alive: What is in memory until the end of the step: parameters, buffers, the batch.
        """
        self._alive = {room_of(tensor)._cdata for tensor in alive}
        self._known: WeakValueDictionary[tuple[Any, ...], _Half] = WeakValueDictionary()
        self._as_it_is = AsItIs()

    def pack(self, tensor: Tensor) -> Any:
        """Return the tensor in bfloat16, or as it is."""
        room = room_of(tensor) if tensor.dtype is torch.float32 else None
        if (
            room is None
            or tensor.numel() <= SMALL
            or room._cdata in self._alive
            # A broadcast tensor takes less room than its copy would.
            or tensor.numel() * torch.bfloat16.itemsize >= room.nbytes()
        ):
            return self._as_it_is.pack(tensor)
        order = _dense(tensor, room.nbytes())
        # Whatever fills its storage is one and the same, however it is transposed or reshaped.
        what = () if order is not None else (tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (room._cdata, tensor._version, *what)
        half = self._known.get(key)
        if half is None or half.room() is not room:  # Storages of the past had the same numbers.
            whole = tensor.detach()
            if order is not None:
                whole = whole.permute(order).view(-1)
            half = self._known[key] = _Half(whole.to(torch.bfloat16), room)
        return half, tensor.shape, order

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor in float32, rounded if it was kept in bfloat16."""
        if not isinstance(kept[0], _Half):
            return self._as_it_is.unpack(kept)
        half, shape, order = kept
        whole: Tensor = half.tensor.to(torch.float32)
        if order is None:
            return whole
        places = [0] * len(order)
        for place, dimension in enumerate(order):
            places[dimension] = place
        return whole.view([shape[dimension] for dimension in order]).permute(places)


class _Half:
    """A tensor in bfloat16, and what held it before."""

    __slots__ = ("__weakref__", "room", "tensor")

    def __init__(self, tensor: Tensor, room: Any) -> None:
        self.tensor, self.room = tensor, ref(room)


def _dense(tensor: Tensor, size: int) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a tensor fills its storage; None if it does not."""
    if tensor.numel() * tensor.element_size() != size:
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else None
