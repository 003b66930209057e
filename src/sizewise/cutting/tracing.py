"""One trace of a model: every operation of both modes, and the channels that come of them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

import numpy as np
from torch import Tensor, nn

from sizewise.cutting.groups import WHOLE, Channels, Group
from sizewise.cutting.tracer import Step, Tracer
from sizewise.cutting.union_find import FIXED, Array, Labels, varying
from sizewise.errors import ModelError
from sizewise.torch_tools.dry_run import (
    MetaMode,
    Recorder,
    named_tensors,
    on_meta,
    run,
    tensors_in,
)
from sizewise.torch_tools.failures import OTHERWISE, VALUES, Paths, reason, told

UNUSED = "takes no part in the forward pass; it stays whole"
STORED = "uses sizes that it stored; its channels stay whole"
STORED_STEP = "gives channels that are counted by a stored size; they stay whole"
STORED_INSIDE = "uses sizes that it stored; the channels inside it stay whole"


@dataclass(frozen=True)
class Whole:
    """A module that is left whole because its narrow copy would not run.

    Attributes:
        path: Its path.
        reads: Whether what it reads and gives is whole too, and not only what is inside it.
        step: Only this result is whole: the mode and its number.
    """

    path: str
    reads: bool = False
    step: tuple[bool, int] | None = None


def traced(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loose: bool,
    whole: Collection[Whole] = (),
    joined: bool = False,
) -> Channels:
    """Trace a model once; see `channels.trace`, which finds out what must be left whole.

    With `joined`, layers are in the order in which they run as in a loose trace, but a residual
    stream is one group.
    """
    meta = tuple(tensor.to("meta") for tensor in inputs)
    double = on_meta(model, trial=True)
    labels = Labels()
    named = dict(named_tensors(double))
    for tensor in {id(t): t for t in named.values()}.values():
        if tensor.is_floating_point():
            labels.add(tensor)
    labels.tables.update(dict.fromkeys(double.buffers(), True))
    tracers = _both_modes(double, labels, meta, loose and not joined)
    used = {key: None for tracer in tracers.values() for key in tracer.used}
    _leave_out(labels, double, used)
    for module in whole:
        _leave_whole(labels, module, tracers)
    labels.resolve()
    if loose:
        # Layers follow each other as they run, whatever the order of their definition.
        order = {key: number for number, key in enumerate(used)}
        named = dict(sorted(named.items(), key=lambda item: order.get(id(item[1]), len(order))))
    found = _collect(labels, named, tracers)
    return replace(
        found,
        saved=tuple(model.state_dict()),
        parameters=tuple(name for name, _ in model.named_parameters()),
        inputs=meta,
        broadcasts=frozenset[str]().union(*(tracer.broadcasts for tracer in tracers.values())),
        loose=loose and not joined,
    )


def _both_modes(
    double: nn.Module, labels: Labels, inputs: Sequence[Tensor], loose: bool
) -> dict[bool, Tracer]:
    """Trace a model in eval mode (key False), and in training mode (True) if it differs there."""
    labels.from_inputs.update(dict.fromkeys(inputs, True))
    paths = Paths(double)
    watch = partial(_outputs, double, paths, inputs)
    tracers = {False: Tracer(labels, double, paths, loose)}
    _follow(tracers[False], labels, paths, partial(watch, False))
    try:
        if _differs(tracers[False], paths, partial(watch, True)):
            tracers[True] = Tracer(labels, double, paths, loose)
            before = [factor for _, factors in tracers[False].results for factor in factors]
            _follow(tracers[True], labels, paths, partial(watch, True), before)
    except ModelError as error:
        # It may need data there, to drop layers at random say. `verify` runs it with data.
        labels.notes.place = "", type(double).__name__
        why = reason(error.__cause__ or error)
        labels.notes.add(
            f"is traced in eval mode only; its training pass does not run without data ({why})"
        )
    return tracers


_Watched = Callable[[MetaMode, int], list[Tensor]]
"""Runs a model without data, seen by a mode and for one token id; returns its outputs."""


def _outputs(
    double: nn.Module,
    paths: Paths,
    inputs: Sequence[Tensor],
    training: bool,
    mode: MetaMode,
    token: int,
) -> list[Tensor]:
    name = type(double).__name__
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
    advice = f"check that it takes such inputs, {OTHERWISE}"
    with told(paths, f"{name} cannot be traced on inputs of shape {shapes}", advice):
        double.train(training)
        mode.numbers.made_up = token
        with mode:
            result = run(double, *inputs)
    outputs = tensors_in(result)
    if not outputs:
        raise ModelError(
            f"{name} gives a {type(result).__name__} without tensors in it that "
            "could be kept whole; wrap it in a module whose forward returns the logits"
        )
    return outputs


def _follow(
    tracer: Tracer, labels: Labels, paths: Paths, watched: _Watched, before: Sequence[Array] = ()
) -> None:
    """Label all that a model computes, and fix what it returns.

    Logits are whole anyway, but features that were computed before, and not returned, are not.
    """
    tracer.outputs = watched(tracer, 0)
    if tracer.numbers.guessed and _differs(tracer, paths, watched, 1):
        raise ModelError(f"the model cannot be traced: {VALUES}")
    labels.notes.place = "", "what the forward returns in training"
    for tensor in tracer.outputs:
        tracer.forget(tensor)
        for factor in labels.of(tensor):
            free = np.setdiff1d(labels.find(factor), FIXED)
            known = any(np.isin(free, labels.find(other)).any() for other in before)
            labels.fix(factor, "stays whole" if known else "")


def _differs(tracer: Tracer, paths: Paths, watched: _Watched, token: int = 0) -> bool:
    """Tell whether a model computes or returns something else than it did when it was traced."""
    recorder = Recorder(paths)
    shapes = [[t.shape for t in found] for found in (watched(recorder, token), tracer.outputs)]
    traced = [(step.operation, step.module, step.shape) for step, _ in tracer.results]
    return traced != recorder.seen or shapes[0] != shapes[1]


def _leave_whole(labels: Labels, module: Whole, tracers: Mapping[bool, Tracer]) -> None:
    """Fix what a module computes: only what nothing else computes, unless it reads whole too."""
    if module.step is not None:
        training, number = module.step
        for step, factors in tracers[training].results[max(number, 0) : number + 1]:
            labels.notes.place = step.operation, step.module
            for factor in factors:
                labels.fix(factor, STORED_STEP)
        return
    inside: list[Array] = []
    outside: list[Array] = [np.full(1, FIXED)]
    for step, factors in (result for tracer in tracers.values() for result in tracer.results):
        within = not module.path or f"{step.module}.".startswith(f"{module.path}.")
        # What is left of a loose sum is what the module gives.
        (inside if within and not step.drops else outside).extend(
            labels.find(factor).ravel() for factor in factors
        )
    found = np.unique(np.concatenate([*inside, outside[0]]))
    labels.notes.place = "", module.path
    if module.reads:
        labels.fix(found, STORED)
    else:
        labels.fix(np.setdiff1d(found, np.concatenate(outside)), STORED_INSIDE)


def _leave_out(labels: Labels, model: nn.Module, used: Collection[int]) -> None:
    """Fix tensors that are not used."""
    for name, tensor in named_tensors(model):
        if id(tensor) not in used:
            labels.notes.place = "", name
            learned = isinstance(tensor, nn.Parameter)
            for factor in labels.of(tensor):
                labels.fix(factor, UNUSED if learned else "")


def _collect(
    labels: Labels, named: Mapping[str, Tensor], tracers: Mapping[bool, Tracer]
) -> Channels:
    """Number the channels group by group and write every tensor's dimensions in these numbers."""
    for tracer in tracers.values():
        for _, factors in tracer.results:
            for factor in factors:
                labels.reduced(factor)  # One that is down to a single set by now is fixed.
    roots: dict[str, list[Array]] = {}
    for name, tensor in named.items():
        cut = _by_dimension(labels, labels.of(tensor))
        whole = (np.full(size, FIXED, dtype=np.int64) for size in tensor.shape)
        roots[name] = [cut.get(dim, default) for dim, default in enumerate(whole)]
    places: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for name, dims in roots.items():
        for dim, found in enumerate(dims):
            # In order of first appearance, so that channel 0 of a group is the first of them.
            _, starts, counts = np.unique(found, return_index=True, return_counts=True)
            for at in np.argsort(starts):
                if (root := int(found[starts[at]])) != FIXED:
                    places[root].append((name, dim, int(counts[at])))
    members: dict[tuple[tuple[str, int, int], ...], list[int]] = defaultdict(list)
    for root, found_in in places.items():
        members[tuple(found_in)].append(root)
    groups: list[Group] = []
    names: dict[str, int] = defaultdict(int)
    lookup = np.full(labels.count, WHOLE, dtype=np.int64)
    count = 0
    for where, channels in members.items():
        name = f"{where[0][0]}:{where[0][1]}"
        names[name] += 1
        if names[name] > 1:  # Two groups can begin in one dimension.
            name = f"{name}#{names[name]}"
        lookup[channels] = np.arange(len(channels)) + count
        count += len(channels)
        spots = tuple((tensor, dim) for tensor, dim, _ in where)
        groups.append(Group(name, len(groups), len(channels), spots))

    def numbered(step: Step, factors: Sequence[Array]) -> Step:
        dims = _by_dimension(labels, factors)
        over = None if step.over is None else lookup[labels.find(step.over)]
        ids = {dim: lookup[found] for dim, found in dims.items()}
        return replace(step, ids=ids, over=over)

    return Channels(
        groups=tuple(groups),
        notes=labels.notes.sentences(),
        tensors={name: tuple(lookup[found] for found in dims) for name, dims in roots.items()},
        passes={mode: tuple(starmap(numbered, t.results)) for mode, t in tracers.items()},
    )


def _by_dimension(labels: Labels, factors: Iterable[Array]) -> dict[int, Array]:
    """Return representatives (n,) along each dimension that can be cut."""
    dims = {}
    for factor in map(labels.reduced, factors):
        for dim in varying(factor):  # Only one, as all splits are resolved.
            dims[dim] = factor.ravel()
    return dims
