"""Channels: which dimensions of which tensors must be cut together, found by tracing.

`trace` runs a model once on meta tensors, that is, without data and without computing anything,
and follows every coordinate of every parameter through the operations, by the rules in
`layer_rules` and `shape_rules`. What hangs together is one channel: a channel of a residual stream
is a row of every convolution that writes the stream, a column of every one that reads it, and an
entry of every norm between. Channels that occur in the same places form a group, and a narrower
model keeps some of each group.

    channels = trace(model, torch.empty(2, 3, 32, 32))
    kept = keep(channels, 0.25, rolling(round_index))     # sizewise.cutting.selection
    small = shrink(model, channels, kept)                 # sizewise.cutting.shrinking

Inputs, classes, kernels and positions are never cut, and neither is anything that an operation
without a rule reads: `Channels.notes` names these. A dimension that is split into heads is cut
inside every head, the same entries in all, so the number of heads stays.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

import numpy as np
from torch import Tensor, nn

from sizewise.cutting.tracer import Mask, Step, Tracer
from sizewise.cutting.union_find import FIXED, Array, Labels, varying
from sizewise.errors import ModelError
from sizewise.torch_tools.dispatch import DispatchMode
from sizewise.torch_tools.dry_run import Recorder, named_tensors, on_meta, run, tensors_in
from sizewise.torch_tools.failures import OTHERWISE, Paths, reason, told

Kept = Mapping[str, Tensor]
"""For each group's name, the kept channels: a sorted int64 tensor."""

WHOLE = -1
"""The id of coordinates that are never cut."""


@dataclass(frozen=True)
class Group:
    """Channels that occur in the same places.

    Attributes:
        name: The first place, such as "stem.conv.weight:0".
        index: Its position among the groups.
        size: How many channels it has.
        members: Every place: a tensor's name and one of its dimensions. A dimension can have room
            for several groups (concatenation), or several entries for each channel (heads,
            flattened pixels).
    """

    name: str
    index: int
    size: int
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Channels:
    """What a trace found.

    Attributes:
        groups: The groups, in the order in which the model's tensors name them.
        notes: What could have been cut but is left whole, and why; one sentence each.
        tensors: For every parameter and buffer, the id of the channel that each coordinate of each
            dimension belongs to. Ids count through the groups in order; `WHOLE` is never cut.
        saved: Names of the tensors in the model's `state_dict`, in its order.
        parameters: Names of the parameters, each tensor once.
        inputs: Meta tensors of the shapes that were traced.
        passes: Results of the operations that compute something, in order, of a forward pass in
            eval mode (key False); and of one in training mode (True) if that runs others.
        broadcasts: Paths of the modules that add a single channel to all of another tensor.
        loose: Whether residual streams may become narrower on the way.
    """

    groups: tuple[Group, ...]
    notes: tuple[str, ...]
    tensors: Mapping[str, tuple[Array, ...]]
    passes: Mapping[bool, tuple[Step, ...]]
    saved: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    broadcasts: frozenset[str] = frozenset()
    loose: bool = False

    def steps(self, training: bool = False) -> tuple[Step, ...]:
        """Return the results of the operations in a mode."""
        return self.passes.get(training, self.passes[False])

    @property
    def cut_share(self) -> float:
        """The share (0 to 1) of the parameters' entries that shrink with the width."""
        entries = whole = 0
        for name in self.parameters:
            dims = self.tensors[name]
            entries += math.prod(len(ids) for ids in dims)
            whole += math.prod(int((ids == WHOLE).sum()) for ids in dims)
        return (entries - whole) / entries if entries else 0.0

    def layer(self, name: str) -> int | None:
        """Return the last group that a tensor's first cut dimension has room for; None: none."""
        for ids in self.tensors[name]:
            if (found := ids[ids != WHOLE]).size:
                ends = np.cumsum([group.size for group in self.groups])
                return int(np.searchsorted(ends, found.max(), side="right"))
        return None

    def mask(self, kept: Kept) -> Mask:
        """Return which ids are kept; `mask[WHOLE]` is True.

        Raises:
            ModelError: `kept` names other groups than these, or channels that a group lacks.
        """
        if unlike := set(kept) ^ {group.name for group in self.groups}:
            raise ModelError(
                f"kept channels are given for each of the model's {len(self.groups)} groups and "
                f"nothing else; {sorted(unlike)[0]!r} is missing or unknown"
            )
        mask = np.zeros(sum(group.size for group in self.groups) + 1, dtype=np.bool_)
        mask[WHOLE] = True
        start = 0
        for group in self.groups:
            chosen = kept[group.name].numpy()
            if not len(chosen) or chosen.min() < 0 or chosen.max() >= group.size:
                raise ModelError(
                    f"the group {group.name!r} keeps one or more of its channels "
                    f"0 to {group.size - 1}; {chosen.tolist()} came"
                )
            mask[start + chosen] = True
            start += group.size
        return mask


def trace(model: nn.Module, *inputs: Tensor, loose: bool = False) -> Channels:
    """Find out which dimensions of a model's tensors hang together.

    Both modes are traced, so that what runs in training only is understood as well.

    Args:
        model: Any module; it is left as it was.
        inputs: What its forward takes, such as images (B, C, H, W). Only shapes and types matter,
            so meta tensors will do.
        loose: Let a residual stream become narrower from block to block: what a block adds to the
            stream is then a group of its own, and the sum has its channels; a model that is cut so
            drops the others from the shortcut.

    Raises:
        ModelError: The model cannot be copied, or cannot run on such inputs without data.
    """
    inputs = tuple(tensor.to("meta") for tensor in inputs)
    double = on_meta(model, trial=True)
    labels = Labels()
    named = dict(named_tensors(double))
    for tensor in {id(t): t for t in named.values()}.values():
        if tensor.is_floating_point():
            labels.add(tensor)
    tracers = _both_modes(double, labels, inputs, loose)
    used = {key: None for tracer in tracers.values() for key in tracer.used}
    _leave_out(labels, double, used)
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
        inputs=inputs,
        broadcasts=frozenset[str]().union(*(tracer.broadcasts for tracer in tracers.values())),
        loose=loose,
    )


def _both_modes(
    double: nn.Module, labels: Labels, inputs: Sequence[Tensor], loose: bool
) -> dict[bool, Tracer]:
    """Trace a model in eval mode (key False), and in training mode (True) if it differs there."""
    labels.from_inputs.update(dict.fromkeys(inputs, True))
    paths = Paths(double)
    watch = partial(_outputs, double, paths, inputs)
    tracers = {False: Tracer(labels, double, paths, loose)}
    _follow(tracers[False], labels, partial(watch, False))
    try:
        if _differs(tracers[False], paths, partial(watch, True)):
            tracers[True] = Tracer(labels, double, paths, loose)
            before = [factor for _, factors in tracers[False].results for factor in factors]
            _follow(tracers[True], labels, partial(watch, True), before)
    except ModelError as error:
        # It may need data there, to drop layers at random say. `verify` runs it with data.
        labels.notes.place = "", type(double).__name__
        why = reason(error.__cause__ or error)
        labels.notes.add(
            f"is traced in eval mode only; its training pass does not run without data ({why})"
        )
    return tracers


_Watched = Callable[[DispatchMode], list[Tensor]]
"""Runs a model without data, seen by a dispatch mode, and returns its outputs."""


def _outputs(
    double: nn.Module, paths: Paths, inputs: Sequence[Tensor], training: bool, mode: DispatchMode
) -> list[Tensor]:
    name = type(double).__name__
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
    advice = f"check that it takes such inputs, {OTHERWISE}"
    with told(paths, f"{name} cannot be traced on inputs of shape {shapes}", advice):
        double.train(training)
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
    tracer: Tracer, labels: Labels, watched: _Watched, before: Sequence[Array] = ()
) -> None:
    """Label all that a model computes, and fix what it returns.

    Logits are whole anyway, but features that were computed before, and not returned, are not.
    """
    tracer.outputs = watched(tracer)
    labels.notes.place = "", "what the forward returns in training"
    for tensor in tracer.outputs:
        tracer.forget(tensor)
        for factor in labels.of(tensor):
            free = np.setdiff1d(labels.find(factor), FIXED)
            known = any(np.isin(free, labels.find(other)).any() for other in before)
            labels.fix(factor, "stays whole" if known else "")


def _differs(tracer: Tracer, paths: Paths, watched: _Watched) -> bool:
    """Tell whether a model computes or returns something else than it did when it was traced."""
    recorder = Recorder(paths)
    shapes = [[t.shape for t in found] for found in (watched(recorder), tracer.outputs)]
    traced = [(step.operation, step.module, step.shape) for step, _ in tracer.results]
    return traced != recorder.seen or shapes[0] != shapes[1]


def _leave_out(labels: Labels, model: nn.Module, used: Collection[int]) -> None:
    """Fix the tensors of recurrent layers, which store sizes everywhere, and unused tensors."""
    tensor: Tensor
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            labels.notes.place = "", path
            for tensor in module.parameters():
                for factor in labels.of(tensor):
                    labels.fix(factor, "is recurrent, which cannot be cut; it stays whole")
    for name, tensor in named_tensors(model):
        if id(tensor) not in used:
            labels.notes.place = "", name
            for factor in labels.of(tensor):
                labels.fix(factor, "takes no part in the forward pass; it stays whole")


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
    lookup = np.full(max(places, default=0) + 1, WHOLE, dtype=np.int64)
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
        return replace(step, ids={dim: lookup[found] for dim, found in dims.items()})

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
