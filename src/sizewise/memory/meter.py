"""A meter for the bytes of live tensors, and the simulated out-of-memory it can raise.

Used like this:

    with Meter(budget=20_000_000) as meter:
        meter.track(model, optimizer, images, labels)
        training_step(model, optimizer, images, labels)
    print(meter.peak)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sizewise.errors import SizewiseError
from sizewise.steps.optimizers import Optimizer
from sizewise.torch_tools.dispatch import DispatchMode
from sizewise.torch_tools.hollow import room_of
from sizewise.torch_tools.placement import BLOCKS
from sizewise.torch_tools.remaking import plain_tensors

Trackable = Tensor | nn.Module | Optimizer | Iterable[Any]
"""What a meter can be told to count: iterables hold more of the same, mappings as their values."""


class OutOfBudget(SizewiseError):
    """A training step crossed its device's budget: a simulated out-of-memory.

    Attributes:
        live: Bytes live after the allocation that crossed the line.
        budget: The device's bytes.
        shape: Shape of the tensor that crossed it.
        dtype: Its type.
        op: The operation that made it.
        layer: Path of the layer at work.
    """

    def __init__(
        self, live: int, budget: int, shape: tuple[int, ...], dtype: str, op: str, layer: str
    ) -> None:
        # All arguments go to the base, so that the error survives the way between two processes.
        super().__init__(live, budget, shape, dtype, op, layer)
        self.live, self.budget = live, budget
        self.shape, self.dtype, self.op, self.layer = shape, dtype, op, layer

    def __str__(self) -> str:
        return (
            f"out of budget: {self.live:,} bytes are live and the device has {self.budget:,}, "
            f"when {self.op} in {self.layer} made a {self.dtype} tensor of shape {self.shape}; "
            "plan a smaller submodel or batch, or give the device more bytes"
        )


class Meter(DispatchMode):
    """Counts the bytes of live tensor storages while it is entered, real, hollow or meta alike.

    It sees what operations return, so whatever is alive beforehand has to be given to `track`.
    Storages are counted once however many tensors share them. Leaving the context forgets them all;
    the meter can then be used again.

    Attributes:
        budget: Raise `OutOfBudget` as soon as more bytes than this are live.
        device: Count what is on this device only; None: whatever there is.
        live: Bytes live now.
        peak: The most bytes that were ever live.
    """

    def __init__(self, budget: int | None = None, device: torch.device | None = None) -> None:
        super().__init__()
        self.budget, self.device = budget, device
        self._block = 1 if device is None else BLOCKS.get(device.type, 1)
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[int, ref[Any]]] = {}
        # Only a meter that can raise has to know which layer is at work.
        self._layers = None if budget is None else _Layers()

    def track(self, *things: Trackable) -> None:
        """Count tensors that are alive already; a module brings its gradients along."""
        for thing in things:
            if self._layers is not None and isinstance(thing, nn.Module):
                self._layers.learn(thing)
            for tensor in tensors_of(thing):
                self._count(tensor, "track")

    def __enter__(self) -> Self:
        if self._layers is not None:
            self._layers.watch()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._layers is not None:
            self._layers.rest()
        # Dropping a weak reference drops its callback with it: nothing is left behind.
        self._known.clear()
        self.live = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count the storages it returns."""
        out = self._run(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._count(out, func)
        elif isinstance(out, tuple | list):
            for tensor in tensors_of(out):
                self._count(tensor, func)
        return out

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _count(self, tensor: Tensor, op: object) -> None:
        if tensor.layout is not torch.strided:
            return  # a sparse tensor is made of strided ones, which were counted when made
        if self.device is not None and tensor.device != self.device:
            return
        storage = room_of(tensor)
        key, size = storage._cdata, -(-storage.nbytes() // self._block) * self._block
        known, weak = self._known.get(key, (0, None))
        if weak is not None and known == size:
            return
        if weak is None:
            weak = ref(storage, lambda _: self._forget(key))
        self._known[key] = (size, weak)
        self.live += size - known
        self._grown(key, size)
        if self.budget is not None and self.live > self.budget:
            layer = self._layers.current() if self._layers else ""
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            raise OutOfBudget(self.live, self.budget, shape, dtype, str(op), layer)

    def _grown(self, key: int, size: int) -> None:
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)[0]


class _Layers:
    """Tells which layer is at work, in the forward pass and in the backward pass."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, str] = {}
        self._stack: list[tuple[str, int]] = []
        # Autograd numbers its nodes in the order of the forward pass: the layer that was at work
        # when a node was made is the one whose backward it runs. Inner layers come first.
        self._spans: deque[tuple[int, int, str]] = deque(maxlen=10_000)
        self._handles: list[Any] = []

    def learn(self, module: nn.Module) -> None:
        self._names |= {layer: name or "the model" for name, layer in module.named_modules()}

    def watch(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def rest(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._names.clear()
        self._stack.clear()
        self._spans.clear()

    def current(self) -> str:
        if self._stack:
            return self._stack[-1][0]
        node: Any = torch._C._current_autograd_node()  # None outside a backward pass
        if node is None:
            return "no layer"
        number = node._sequence_nr()
        for first, end, name in self._spans:
            if first <= number < end:
                return f"{name} (backward)"
        return f"{node.name()} (backward)"

    def _enter(self, module: nn.Module, args: object) -> None:
        name = self._names.get(module, type(module).__name__)
        self._stack.append((name, torch._C._autograd._get_sequence_nr()))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        name, first = self._stack.pop()
        self._spans.append((first, torch._C._autograd._get_sequence_nr(), name))


def tensors_of(thing: object) -> Iterator[Tensor]:
    """Yield the tensors of a module, an optimiser's state, or any nest of containers."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from thing.buffers()
        yield from plain_tensors(thing)
        for parameter in thing.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    elif hasattr(thing, "param_groups") and hasattr(thing, "state"):
        yield from tensors_of(thing.state)
    elif isinstance(thing, Mapping):
        yield from tensors_of(thing.values())
    elif isinstance(thing, Iterable) and not isinstance(thing, str):
        for item in thing:
            yield from tensors_of(item)
