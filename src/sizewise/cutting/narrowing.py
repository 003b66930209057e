"""Models that become narrower on the way: full width up to some layer, a fraction of it after.

Along a residual stream, the block that becomes narrower adds its few channels to a shortcut that
has more; the others are dropped, as in SLT. The model's code need not know: its sums are taken
care of while its forward runs.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SUMS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__})


def channel_dim(rank: int) -> int:
    """Return the dimension of channels: second in feature maps, last in tokens and vectors."""
    return 1 if rank > 3 else -1


def drop_channels(model: nn.Module, broadcasts: Collection[str] = ()) -> nn.Module:
    """Let a model's sums drop the last channels of the wider of two terms; changes it in place.

    Its parts do so too when they run by themselves.

    Args:
        model: Any module.
        broadcasts: Paths of the modules that add a single channel to all others, which drops
            nothing. Anywhere else, a single channel is what is left of many.
    """
    turn = _Turn()
    for path, part in model.named_modules():
        if part is model or path in broadcasts or next(part.children(), None) is not None:
            sums = _Sums(path in broadcasts, turn)
            part.register_forward_pre_hook(sums.begin)
            part.register_forward_hook(sums.end, always_call=True)
    return model


@dataclass
class _Turn:
    """Whether a module has dealt with the sum under way, so that those around it need not."""

    taken: bool = False


class _Sums(TorchFunctionMode):
    """Cuts the wider of two terms to the other's shape, while a module's forward runs."""

    def __init__(self, broadcasts: bool, turn: _Turn) -> None:
        super().__init__()
        self._broadcasts, self._turn = broadcasts, turn

    def begin(self, *_: object) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: object) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = func in _SUMS and isinstance(args[0], Tensor) and isinstance(args[1], Tensor)
        if not tensors or self._turn.taken:
            return func(*args, **(kwargs or {}))
        self._turn.taken = True
        try:
            args = (*_fitted(args[0], args[1], self._broadcasts), *args[2:])
            return func(*args, **(kwargs or {}))
        finally:
            self._turn.taken = False


def _fitted(left: Tensor, right: Tensor, broadcasts: bool) -> tuple[Tensor, Tensor]:
    if left.ndim != right.ndim:
        return left, right
    sizes = enumerate(zip(left.shape, right.shape, strict=True))
    differ = [dim for dim, (a, b) in sizes if a != b]
    # Tensors that differ in other places, such as biases and positions, are broadcast as ever.
    channel = channel_dim(left.ndim) % max(left.ndim, 1)
    if differ != [channel]:
        return left, right
    size = min(left.shape[channel], right.shape[channel])
    if size == 1 and broadcasts:
        return left, right
    return left.narrow(channel, 0, size), right.narrow(channel, 0, size)
