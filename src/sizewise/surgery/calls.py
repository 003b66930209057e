"""Noting what happens while a model runs: every call of a module, and when tensors are used."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from sizewise.errors import ModelError
from sizewise.torch_tools.remaking import clone, remade


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        module: It.
        path: Where it is; the first of its places.
        start: When it began; what happens in a model is counted.
        arguments: Leaves of what came in.
        versions: And how often each was changed until then, in place.
        results: Leaves of what went out.
        after: And how often each was changed until then.
        node: The step of the backward pass that made the hidden tensor which went out.
        calls: Those that it made itself.
    """

    module: nn.Module
    path: str
    start: int
    arguments: list[Any]
    versions: list[int]
    results: list[Any] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    spec: Any = None
    node: Any = None
    calls: list["Call"] = field(default_factory=list)

    @property
    def taken(self) -> int | None:
        """The first argument of numbers, as a leaf."""
        return _first(self.arguments)

    @property
    def given(self) -> int | None:
        """The first result of numbers, as a leaf."""
        return _first(self.results)

    def every(self) -> Iterator["Call"]:
        """Yield all calls below this one, in the order in which they began."""
        for call in self.calls:
            yield call
            yield from call.every()


def _first(leaves: Sequence[Any]) -> int | None:
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1:
            return number
    return None


class _Uses(TorchFunctionMode):
    """Notes when each of a model's tensors is first used by an operation."""

    def __init__(self, model: nn.Module, clock: list[int]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.clock, self.first = clock, dict[int, int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.known:
                self.first.setdefault(id(leaf), self.clock[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Trace:
    """What happened while a model ran.

    Attributes:
        model: A copy of the model, with the tensors that were used.
        root: The call of the model itself.
        uses: When each tensor was first used, by its id.
    """

    model: nn.Module
    root: Call
    uses: Mapping[int, int]


def traced(model: nn.Module, x: Tensor) -> Trace:
    """Run a copy of a model, and note every call."""
    double = remade(model, clone).eval()
    for parameter in double.parameters():
        # What depends on what is seen in the graph, so that everything has to learn.
        parameter.requires_grad_(parameter.is_floating_point())
    clock, open_calls, roots = [0], list[Call](), list[Call]()

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        clock[0] += 1
        leaves = tree_leaves((args, kwargs))
        call = Call(module, path, clock[0], leaves, _versions(leaves))
        (open_calls[-1].calls if open_calls else roots).append(call)
        open_calls.append(call)

    def end(result: Any) -> None:
        clock[0] += 1
        call = open_calls.pop()
        call.results, call.spec = tree_flatten(result)
        call.after = _versions(call.results)
        if call.given is not None:
            call.node = call.results[call.given].grad_fn

    for path, module in double.named_modules():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, path=path: begin(path, module, args, kwargs),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda module, args, result: end(result))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), _Uses(double, clock) as uses:
            double(x)
    except Exception as error:  # a model of the user's may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"{type(model).__name__} cannot be taken apart: {reason}") from error
    return Trace(double, roots[0], uses.first)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
