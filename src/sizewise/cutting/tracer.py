"""The tracer: applies the rule of every operation that a model runs, and remembers the results."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sizewise.cutting import layer_rules, shape_rules, silence
from sizewise.cutting.layer_rules import FACTORIES, POINTWISE, first, pointwise, unknown
from sizewise.cutting.narrowing import channel_dim
from sizewise.cutting.sizes.recurrent import state_dim
from sizewise.cutting.union_find import Array, Labels, Mask, varying
from sizewise.torch_tools.dry_run import MetaMode, computed, operation, positional, tensors_in
from sizewise.torch_tools.failures import Paths


@dataclass(frozen=True, eq=False)
class Step:
    """The result of one operation of the forward pass.

    Attributes:
        operation: What it computes, see `computed`.
        module: Path of the module whose forward ran it.
        shape: Shape of its (first) result.
        ids: For each dimension that can be cut, the channel id of each coordinate; known when all
            is traced.
        over: The channel ids that a mean of squares is over, in its last dimension; a narrow model
            has fewer of them.
        drops: Whether it is a sum in which a loosely cut model drops channels of a shortcut.
    """

    operation: str
    module: str
    shape: tuple[int, ...]
    ids: Mapping[int, Array] = field(default_factory=dict)
    over: Array | None = None
    drops: bool = False

    def cut_shape(self, mask: Mask) -> tuple[int, ...]:
        """Return the shape of the same result in a model that has only the kept channels."""
        return tuple(
            int(mask[self.ids[dim]].sum()) if dim in self.ids else size
            for dim, size in enumerate(self.shape)
        )


class Tracer(MetaMode):
    """Watches one forward pass.

    Attributes:
        used: Ids of the tensors that were read, in the order of their first use.
        results: What the operations gave, in order, and the labels of that. The labels that a mean
            of squares is over are in its step until all is traced.
        outputs: What the model returned, for those who run it.
        broadcasts: Paths of the modules with a sum of a map of one channel and one of several.
    """

    def __init__(self, labels: Labels, model: nn.Module, paths: Paths, loose: bool) -> None:
        super().__init__()
        self.used: dict[int, None] = {}
        self.results: list[tuple[Step, list[Array]]] = []
        self.outputs: list[Tensor] = []
        self.broadcasts: set[str] = set()
        self._labels, self._paths, self._loose = labels, paths, loose
        self._modules = dict(model.named_modules())
        # By the tensors themselves: the id of one that is gone may be given to another.
        self._read: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._notes: MutableMapping[Tensor, list[Any]] = WeakTensorKeyDictionary()

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        out = super()._operate(func, args, kwargs)
        read, gives = tensors_in((args, kwargs)), tensors_in(out)
        self.used.update(dict.fromkeys(id(tensor) for tensor in read))
        if operation(func) == "zeros":
            dim = state_dim(self._modules[self._paths.current])
            if dim is not None and gives[0].ndim > 1:
                self._labels.add(gives[0], [dim])
        drops = operation(func) == "add" and self._drops(read, gives[0])
        if any(self._labels.of(tensor) for tensor in read) and operation(func) not in FACTORIES:
            self._label(func, args, kwargs, out, read, drops)
        for tensor in read:
            self._read[tensor] = True
        labelled = [tensor for tensor in read if self._labels.of(tensor)]
        if labelled and all(tensor in self._labels.tables for tensor in labelled):
            self._labels.tables.update(dict.fromkeys(gives, True))
        if any(tensor in self._labels.from_inputs for tensor in read):
            self._labels.from_inputs.update(dict.fromkeys(gives, True))
        if gives and gives[0].is_floating_point():
            factors = self._labels.of(gives[0])
            for kind in computed(func):
                shape = tuple(gives[0].shape)
                over = self._labels.averaged.get(gives[0])
                step = Step(kind, self._paths.current, shape, over=over, drops=drops)
                self.results.append((step, factors))
        return out

    def _label(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        out: Any,
        read: list[Tensor],
        drops: bool,
    ) -> None:
        labels, name = self._labels, operation(func)
        labels.notes.place = name, self._paths.current
        labels.layer = layer = self._modules[self._paths.current]
        labels.notes.in_layer = next(layer.children(), None) is None
        before = len(labels.notes.made)
        loud = {id(tensor) for tensor in read if labels.loud(tensor)}
        if drops:
            pointwise(labels, out, [term for term in read if term not in self._read])
        elif name in layer_rules.RULES:
            layer_rules.RULES[name](labels, out, *positional(func, args, kwargs))
        elif name in shape_rules.RULES:
            shape_rules.RULES[name](labels, out, *positional(func, args, kwargs))
            for tensor in tensors_in(out):
                labels.set_loud(tensor, bool(loud) or silence.wakes(func, args))
        elif torch.Tag.pointwise in func.tags or name in POINTWISE:
            pointwise(labels, first(out), read)
            found = silence.is_loud(labels, func, args, kwargs, first(out), loud)
            labels.set_loud(first(out), found)
            if _squares(func, args):
                labels.squares[first(out)] = True
        else:
            unknown(labels, read)
        for tensor in tensors_in(out):
            self._notes[tensor] = labels.notes.made[before:]

    def _drops(self, terms: list[Tensor], out: Tensor) -> bool:
        """Tell whether a sum is of a stream that others have read, a shortcut, and of its block."""
        if len(terms) != 2 or not out.ndim:
            return False
        dim = channel_dim(out.ndim)
        if terms[0].ndim == terms[1].ndim and 1 in {t.shape[dim] for t in terms} != {1}:
            self.broadcasts.add(self._paths.current)
        fresh = [term for term in terms if term not in self._read]
        return (
            self._loose
            and len(fresh) == 1
            and terms[0].shape == terms[1].shape
            and all(varying(f) == [dim % out.ndim] for f in self._labels.of(fresh[0]))
        )

    def forget(self, output: Tensor) -> None:
        """Take back the notes on an operation that gave an output: that is whole in any case."""
        for note in self._notes.get(output, ()):
            if note in self._labels.notes.made:
                self._labels.notes.made.remove(note)


def _squares(func: Any, args: Any) -> bool:
    """Tell whether a pointwise operation squares a tensor."""
    name = operation(func)
    return (
        name == "square"
        or (name == "pow" and args[1:2] == (2,))
        or (name == "mul" and args[0] is args[1])
    )
