"""Blocks that keep only their inputs, and run a second time when their backward pass comes.

    with checkpointed(model, ["encoder.layers"], AsItIs()):
        loss(model, images, labels).backward()

The graph is that of plain training, only what it saves is missing until it is needed; so gradients
have the same bits, tied weights included. The second run draws the random numbers of the first,
leaves the statistics of norms alone, and ends as soon as the last saved tensor is there, which is
before the block's last operation. `torch.utils.checkpoint` does much the same, and imports torch's
compiler, which takes two seconds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from sizewise.errors import ModelError
from sizewise.torch_tools.keeping import Keeper

_LISTS = (nn.ModuleList, nn.Sequential)
_LONG = 8
"""Layers in a row up to which a `nn.Sequential` of plain layers is one block."""


@contextmanager
def checkpointed(module: nn.Module, paths: Sequence[str], keeper: Keeper) -> Iterator[None]:
    """Let blocks of a module run twice while the context is entered.

    Args:
        module: Whose blocks; its forward is replaced on the instances for that time.
        paths: Of the blocks; a list of modules stands for its items. None given: those found.
        keeper: Holds the inputs of blocks, and what their second runs save.

    Raises:
        ModelError: There is nothing at a path, one block is in another, or none are found.
    """
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        found = named_blocks(module, paths) if paths else found_blocks(module).values()
        for block in found:
            replaced.append((block, vars(block).get("forward")))
            vars(block)["forward"] = _twice(block, keeper)
        yield
    finally:
        for block, before in replaced:
            if before is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = before


def named_blocks(module: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return the modules at some paths; a list of modules stands for its items."""
    found: list[nn.Module] = []
    for path in paths:
        try:
            block = module.get_submodule(path)
        except AttributeError as error:
            raise ModelError(
                f"{type(module).__name__} has no module at {path!r} to checkpoint; name one of its "
                "modules, or none to have them found"
            ) from error
        found += block if isinstance(block, nn.ModuleList) else [block]
    inner = {id(child) for block in found for child in block.modules() if child is not block}
    for block in found:
        if id(block) in inner:
            raise ModelError(
                f"a {type(block).__name__} of {type(module).__name__} is to be checkpointed twice, "
                "alone and with what it is in; name one of both"
            )
    return list({id(block): block for block in found}.values())


def found_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return modules that are worth running twice, by path, in the order in which they are held.

    They are the items of lists that consist of layers themselves, and sequences of plain layers
    outside of lists, but for one at the end, such as a head: its turn to go back comes at once, so
    nothing is gained by forgetting what it computed.

    Raises:
        ModelError: There are none.
    """
    chosen = {id(block): (block, item) for block, item in _search(module)}
    *_, (last, item) = ((None, True), *chosen.values())
    if len(chosen) > 1 and last is not None and not item and not _long(last):
        del chosen[id(last)]
    found = {path: child for path, child in module.named_modules() if id(child) in chosen}
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no list of blocks to checkpoint; name modules that it "
            "runs in levers.blocks, or do without levers.checkpoint"
        )
    return found


def _search(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield blocks, and whether each is an item of a list."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # Its forward cannot be replaced.
    if _flat(module) and len(list(module.children())) > 1:
        yield module, False
        return
    for child in module.children():
        own = any(True for _ in child.children()) and not isinstance(child, _LISTS)
        if isinstance(module, _LISTS) and (own or _flat(child)):
            yield child, True
        else:
            yield from _search(child)


def _flat(module: nn.Module) -> bool:
    """Return whether a module is a sequence of layers that have no layers inside."""
    plain = type(module).forward is nn.Sequential.forward
    return plain and not any(True for layer in module.children() for _ in layer.children())


def _long(module: nn.Module) -> bool:
    return _flat(module) and len(list(module.children())) > _LONG


def _twice(block: nn.Module, keeper: Keeper) -> Callable[..., Any]:
    """Return a forward of a block that can be run again."""
    if not _long(block):
        return _Block(block.forward, [block], keeper)
    layers = list(block.children())
    count = math.isqrt(len(layers))
    bounds = [len(layers) * number // count for number in range(count + 1)]
    rows = [layers[start:stop] for start, stop in pairwise(bounds)]
    return _chain([_Block(_chain(row), row, keeper) for row in rows])


def _chain(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return forward


class _Block:
    """Something that runs twice.

    Attributes:
        forward: What runs.
        keeper: Holds what waits for the backward pass.
        norms: Layers that keep statistics of what they see now, which they do not use now.
    """

    def __init__(
        self, forward: Callable[..., Any], modules: Sequence[nn.Module], keeper: Keeper
    ) -> None:
        layers = [layer for module in modules for layer in module.modules()]
        self.forward, self.keeper = forward, keeper
        self.norms = [
            layer
            for layer in layers
            if isinstance(layer, _NormBase) and layer.training and layer.running_mean is not None
        ]
        self._name = type(modules[0]).__name__
        self._lasting: list[Tensor] = []
        for layer in layers:
            self._lasting += layer.parameters(recurse=False)
            if layer not in self.norms:
                self._lasting += layer.buffers(recurse=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run for the first time."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = _Call(self, args, kwargs)
        with saved_tensors_hooks(call.pack, _take):
            out = self.forward(*args, **kwargs)
        call.ran()
        return out

    def versions(self) -> list[int]:
        """Return how often each tensor was changed that must not change between two runs."""
        return [tensor._version for tensor in self._lasting]

    def error(self, what: str) -> ModelError:
        """Return what to raise if it does something that cannot be run again."""
        return ModelError(
            f"{self._name} {what}, so it cannot be checkpointed; leave it out of levers.blocks, or "
            "do without levers.checkpoint"
        )


class _Enough(Exception):
    """Ends the second run of a block: all that it saves is there."""


class _Slot:
    """Stands for a tensor that was saved in the first run, and holds that of the second."""

    __slots__ = ("__weakref__", "call", "kept")

    def __init__(self, call: "_Call") -> None:
        self.call, self.kept = call, None


def _take(slot: _Slot) -> Tensor:
    if slot.kept is None:
        slot.call.run_again()
    return slot.call.block.keeper.unpack(slot.kept)


class _Call:
    """One call of a block: its inputs, and slots for what it saves.

    The nodes of the graph own the slots, and these own the call: what a node is done with is gone.
    """

    def __init__(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self._slots: list[tuple[ref[_Slot], torch.Size]] = []
        self._tensors: dict[int, tuple[Any, bool]] = {}
        self._inputs: Any = tree_map(self._put_away, (args, kwargs))
        self._precision = _autocast()
        self._random: Tensor | None = torch.get_rng_state()
        self._versions = block.versions()

    def pack(self, tensor: Tensor) -> _Slot:
        """Return a slot in place of a tensor that the first run saves."""
        slot = _Slot(self)
        self._slots.append((ref(slot), tensor.shape))
        return slot

    def ran(self) -> None:
        """Look at what the first run did."""
        self._check("as it runs")
        if torch.equal(torch.get_rng_state(), self._random):  # type: ignore[arg-type]
            self._random = None  # It drew nothing; a state takes 5 kB.

    def run_again(self) -> None:
        """Fill the slots that somebody still owns."""
        self._check("before its backward pass")
        args, kwargs = tree_map(self._restore(), self._inputs)
        self._inputs, self._tensors = None, {}
        slots = iter(self._slots)
        left = len(self._slots)

        def fill(tensor: Tensor) -> None:
            nonlocal left
            weak, shape = next(slots)
            if tensor.shape != shape:
                raise self.block.error("computed other shapes when it ran again")
            slot = weak()
            if slot is not None:
                slot.kept = self.block.keeper.pack(tensor)
            left -= 1
            if not left:
                raise _Enough

        with ExitStack() as around:
            for context in (torch.enable_grad(), _drawing(self._random), *self._precision):
                around.enter_context(context)
            around.enter_context(_own_statistics(self.block.norms))
            around.enter_context(saved_tensors_hooks(fill, _never))
            try:
                self.block.forward(*args, **kwargs)
            except _Enough:
                return
        raise self.block.error("saved less when it ran again")

    def _put_away(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # By number: a block may ask whether two of its inputs are the same tensor.
        if id(value) not in self._tensors:
            self._tensors[id(value)] = self.block.keeper.pack(value), value.requires_grad
        return _Input(id(value))

    def _restore(self) -> Callable[[Any], Any]:
        made: dict[int, Tensor] = {}

        def restore(value: Any) -> Any:
            if not isinstance(value, _Input):
                return value
            if value.number not in made:
                kept, learns = self._tensors[value.number]
                tensor = self.block.keeper.unpack(kept)
                made[value.number] = tensor.detach().requires_grad_(learns)
            return made[value.number]

        return restore

    def _check(self, when: str) -> None:
        if self._versions != self.block.versions():
            raise self.block.error(f"changes its own tensors {when}")


class _Input:
    """Stands for a tensor among the inputs of a block."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes back through a second run")


@contextmanager
def _own_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Give norms copies of their statistics, so that the same batch does not count twice."""
    before = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            kept = norm._buffers.items()
            norm._buffers.update({k: b if b is None else b.clone() for k, b in kept})
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


@contextmanager
def _drawing(state: Tensor | None) -> Iterator[None]:
    """Draw random numbers from a state, and go on as before afterwards."""
    if state is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _autocast() -> list[Any]:
    """Return the automatic precision that is on, to be entered later."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
