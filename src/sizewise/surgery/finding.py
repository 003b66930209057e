"""Finding the blocks of any model: repeated modules through which one tensor flows.

The model runs once on two samples, and every call of a module is noted: who called it, what came
in, what went out. A module whose result is that of a chain of its own parts is a container, and is
looked into; all others are single pieces. So a stage is taken apart and a residual block is not, in
which something goes around its layers. Of the pieces in a row, each made from what the one before
gave, the longest row that begins and ends with a kind of module that is there more than once are
the blocks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from sizewise.errors import ModelError
from sizewise.surgery.anatomy import Anatomy, anatomy, block_paths, paths_of
from sizewise.surgery.in_place import Form, InPlace
from sizewise.torch_tools.remaking import clone, remade


TRIED = 4
"""Rows of modules that are tried as blocks, the most likely first."""


def taken_apart(
    model: nn.Module,
    x: Tensor,
    stem: str | Sequence[str] | None = None,
    blocks: str | Sequence[str] | None = None,
    head: str | Sequence[str] | None = None,
) -> Anatomy:
    """Return a model's parts, checked: in turn if it is a chain, else in place.

    Args:
        model: Any module; it is left as it was.
        x: Two samples, (2, ...).
        stem: As for `anatomy`.
        blocks: As for `anatomy`; default: they are found.
        head: As for `anatomy`.

    Raises:
        ModelError: A path is wrong, or the model cannot be taken apart.
    """
    chain = None
    if None not in (stem, blocks, head):
        chain = anatomy(model, stem, blocks, head)
    elif stem is blocks is head is None:
        with suppress(ModelError):  # Nobody said that it has these parts.
            chain = anatomy(model)
    else:
        for part, given in (("stem", stem), ("head", head)):
            paths_of(model, part, given) if given is not None else ()
    if chain is not None and chain.trouble(model, x) is None:
        return chain
    trace = _traced(model, x)
    if blocks is not None:
        return _checked(trace, model, x, _named(trace, block_paths(model, blocks)))
    refusals = []
    for found in islice(_candidates(trace.root), TRIED):
        try:
            return _checked(trace, model, x, found)
        except ModelError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    raise ModelError(
        f"no blocks were found in {type(model).__name__}, modules in a row through which one "
        "tensor flows; name them in model.anatomy, or choose a method that does not take the model "
        "apart"
    )


def _checked(trace: "_Trace", model: nn.Module, x: Tensor, blocks: Sequence["_Call"]) -> InPlace:
    """Return the parts of a model with these blocks; raise ModelError if they are none."""
    stem, between, head = _owners(trace, blocks)
    paths = tuple(call.path for call in blocks)
    parts = InPlace(stem, paths, head, _forms(trace, blocks), between)
    parts.check(model, x)
    return parts


def _named(trace: "_Trace", paths: Sequence[str]) -> list["_Call"]:
    """Return the first call of each block, given their paths."""
    called = {id(call.module): call for call in reversed(list(trace.root.every()))}
    modules = {path: trace.model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if id(module) not in called:
            raise ModelError(
                f"{path!r} is not called when {type(trace.model).__name__} runs, so it is no "
                "block; name others in model.anatomy"
            )
    return _once([called[id(module)] for module in modules.values()])


@dataclass(eq=False)
class _Call:
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
    calls: list["_Call"] = field(default_factory=list)

    @property
    def taken(self) -> int | None:
        """The first argument of numbers, as a leaf."""
        return _first(self.arguments)

    @property
    def given(self) -> int | None:
        """The first result of numbers, as a leaf."""
        return _first(self.results)

    def every(self) -> Iterator["_Call"]:
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
class _Trace:
    """What happened while a model ran.

    Attributes:
        model: A copy of the model, with the tensors that were used.
        root: The call of the model itself.
        uses: When each tensor was first used, by its id.
    """

    model: nn.Module
    root: _Call
    uses: Mapping[int, int]


def _traced(model: nn.Module, x: Tensor) -> _Trace:
    """Run a copy of a model, and note every call."""
    double = remade(model, clone).eval()
    for parameter in double.parameters():
        # What depends on what is seen in the graph, so that everything has to learn.
        parameter.requires_grad_(parameter.is_floating_point())
    clock, open_calls, roots = [0], list[_Call](), list[_Call]()

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        clock[0] += 1
        leaves = tree_leaves((args, kwargs))
        call = _Call(module, path, clock[0], leaves, _versions(leaves))
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
    return _Trace(double, roots[0], uses.first)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]


# ---- which modules are looked into


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _layers(call: _Call) -> list[_Call]:
    """Return the calls that a call made itself, of modules with parameters."""
    return [inner for inner in call.calls if _learns(inner.module)]


def _flat(call: _Call) -> bool:
    """Return whether all that a call made itself are plain layers."""
    return not any(_layers(inner) for inner in call.calls)


def _is_chain(call: _Call) -> bool:
    """Return whether what a module gives is what the last of a chain of its parts gives.

    Nothing may go around: each tensor on the way goes to one module with parameters at most, and
    nobody changes it between two of them.
    """
    if call.taken is None or call.given is None:
        return False
    tensor, version = call.arguments[call.taken], call.versions[call.taken]
    goal, changed, waiting = call.results[call.given], call.after[call.given], list(call.calls)
    while tensor is not goal or version != changed:
        users = [inner for inner in waiting if _takes(inner, tensor, version)]
        chosen = [inner for inner in users if _learns(inner.module)] or users[:1]
        if len(chosen) != 1:
            return False
        (step,) = chosen
        waiting = [inner for inner in waiting if inner.start > step.start]
        if step.given is None:
            return False
        tensor, version = step.results[step.given], step.after[step.given]
    return True


def _takes(call: _Call, tensor: Tensor, version: int) -> bool:
    pairs = zip(call.arguments, call.versions, strict=True)
    return any(leaf is tensor and seen == version for leaf, seen in pairs)


def _pieces(root: _Call, into_flat: bool) -> list[_Call]:
    """Return the calls that a model consists of, in order, once containers are looked into.

    Args:
        root: The call of the model.
        into_flat: Also look into modules of plain layers.
    """
    every = list(root.every())
    kinds = Counter(type(module) for module in {call.module: None for call in every})
    # One block of many may have nothing that goes around it; it is still a block.
    mixed = {
        type(call.module)
        for call in every
        if _layers(call) and not isinstance(call.module, nn.Sequential) and not _is_chain(call)
    }

    first = next((call.start for call in every if _learns(call.module) and not _layers(call)), 0)

    def is_open(call: _Call) -> bool:
        layers, kind = _layers(call), type(call.module)
        if not layers or (_flat(call) and not into_flat):
            return False
        if kinds[kind] == 1 and (call.start < first or call.taken is None):
            return True  # What begins before any layer runs is the model in its wrapping.
        composed = sum(bool(_layers(inner)) for inner in layers)
        mostly = into_flat or 3 * composed >= len(layers)
        return mostly and kind not in mixed and _is_chain(call)

    def within(call: _Call) -> Iterator[_Call]:
        for inner in _layers(call):
            if is_open(inner):
                yield from within(inner)
            else:
                yield inner

    return list(within(root))


# ---- which of them are blocks


def _rows(pieces: Sequence[_Call]) -> list[list[_Call]]:
    """Return pieces in rows: each is made from what the one before it gave."""
    rows: list[list[_Call]] = []
    for piece in pieces:
        if piece.taken is None or piece.given is None:
            continue
        made = [row for row in rows if _follows(piece, row[-1])]
        if made:
            # Of several, the row that was added to last.
            row = max(made, key=lambda row: row[-1].start)
            row.append(piece)
        else:
            rows.append([piece])
    return rows


def _follows(later: _Call, earlier: _Call) -> bool:
    """Return whether what goes into a call depends on what another gave."""
    assert later.taken is not None
    tensor = later.arguments[later.taken]
    if earlier.given is not None and tensor is earlier.results[earlier.given]:
        return True
    seen, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is earlier.node and node is not None:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False


def _candidates(root: _Call) -> Iterator[list[_Call]]:
    """Yield what may be the blocks of a model, the most likely first: one call for each."""
    yield from _repeated(_pieces(root, into_flat=False))
    # Something that is no chain may hold one.
    inner = [found for call in root.every() for found in _repeated(_layers(call))]
    yield from sorted(inner, key=len, reverse=True)
    # Plain layers, the first and the last of which are stem and head.
    layers = _pieces(root, into_flat=True)
    rows = [row for row in _rows(layers) if len(row) > 2]
    yield from (_once(row[1:-1]) for row in sorted(rows, key=len, reverse=True)[:1])


def _repeated(pieces: Sequence[_Call]) -> list[list[_Call]]:
    """Return rows of pieces of layers that begin and end with a kind that is there again.

    The longest comes first, of several the last. Kinds that hold more than plain layers count
    before those that do not, such as the convolutions of a stem.
    """
    found = []
    for row in _rows([piece for piece in pieces if _layers(piece)]):
        kinds = Counter(type(p.module) for p in row if type(p.module) is not nn.Sequential)
        repeated = {kind for kind, count in kinds.items() if count > 1}
        deep = {type(piece.module) for piece in row if not _flat(piece)} & repeated
        places = [n for n, piece in enumerate(row) if type(piece.module) in (deep or repeated)]
        if places:
            found.append(row[places[0] : places[-1] + 1])
    return [_once(row) for row in sorted(reversed(found), key=len, reverse=True)]


def _once(calls: Sequence[_Call]) -> list[_Call]:
    """Return calls without those of a module that was called before: it is one block."""
    found: dict[int, _Call] = {}
    for call in calls:
        found.setdefault(id(call.module), call)
    return list(found.values())


# ---- what is said of them


def _forms(trace: _Trace, blocks: Sequence[_Call]) -> tuple[Form, ...]:
    """Return what each block takes and gives."""
    last = {id(call.module): call for call in trace.root.every()}
    found: list[Form] = []
    for number, first in enumerate(blocks):
        call = last[id(first.module)]  # A module that is called again gives what its last call gave.
        taken, given, after = first.taken, call.given, blocks[number + 1 :][:1]
        shapes = [_sample(leaf) for leaf in call.results]
        inner = None if taken is None else _sample(first.arguments[taken])
        if taken is None or given is None or inner is None or shapes[given] is None:
            raise ModelError(
                f"the block {first.path!r} does not map a tensor of samples to another; name other "
                "blocks in model.anatomy"
            )
        carried = [pair for later in after for pair in _carried(call, later) if pair[0] != given]
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in call.results)
        form = Form(taken, given, inner, tuple(shapes), call.spec, tuple(carried), constants)
        if not after and found and found[-1].spec == form.spec:
            form = replace(form, carried=found[-1].carried)
        found.append(form)
    return tuple(found)


def _sample(leaf: Any) -> torch.Size | None:
    samples = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1
    return leaf.shape[1:] if samples and len(leaf) == 2 else None


def _carried(call: _Call, later: _Call) -> Iterator[tuple[int, int]]:
    """Yield which results are which arguments of the next block, called in the same way."""
    if len(call.arguments) != len(later.arguments):
        return
    for number, result in enumerate(call.results):
        for place, argument in enumerate(later.arguments):
            if isinstance(result, Tensor) and argument is result:
                yield number, place
                break


def _owners(
    trace: _Trace, blocks: Sequence[_Call]
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return tensors outside of blocks: of the stem, between blocks with their block, of the head.

    Whose a tensor is is said by when it is first used: after how many blocks began.
    """
    starts = [call.start for call in blocks]
    calls: dict[int, int] = {}
    for call in (trace.root, *trace.root.every()):
        calls.setdefault(id(call.module), call.start)
    inside = tuple(f"{call.path}." for call in blocks)
    stem, between, head = list[str](), list[tuple[str, int]](), list[str]()
    for path, module in trace.model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for leaf, tensor in own.items():
            name = f"{path}.{leaf}" if path else leaf
            if tensor is None or name.startswith(inside):
                continue
            # What is never used may be anything, and is best not in anybody's way.
            used = trace.uses.get(id(tensor), calls.get(id(module)))
            begun = len(blocks) if used is None else sum(start <= used for start in starts)
            if begun == 0:
                stem.append(name)
            elif begun == len(blocks):
                head.append(name)
            else:
                between.append((name, begun - 1))
    return tuple(stem), tuple(between), tuple(head)
