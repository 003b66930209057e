"""Labels: which entries of which tensors stand or fall together.

Before a model is traced, every coordinate of every parameter dimension is an atom of its own.
Operations unify atoms: adding two tensors ties their channels one by one, a convolution ties the
inputs of its weight to the channels of what it reads. What is one set in the end is one channel,
which a narrower model has everywhere or nowhere.

A tensor carries *factors*: integer arrays with as many dimensions as the tensor, of size 1 along
those they do not vary over. At most one factor varies over a dimension, and an entry of the tensor
belongs to a narrower model if all its labels are kept. Label 0 is `FIXED`: always kept. A dimension
that no factor varies over (batch, pixels, classes) is kept as a whole.

    weight of a convolution, (O, I, 3, 3)    two factors, (O, 1, 1, 1) and (1, I, 1, 1)
    features, (B, C, H, W)                   one factor, (1, C, 1, 1)
    the same, flattened, (B, C * H * W)      one factor, (1, C * H * W), labels repeated
    C split into heads, (B, N, heads, C/h)   one factor over both dimensions, until an operation
                                             asks for the labels along one of them

Two things are known of a tensor besides: whether it was computed from the model's inputs, because
what it loses is worth a note; and whether it is *loud*, that is, not zero where a channel is
dropped that the full model has masked (see `silence`).
"""

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Array = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]
"""For each channel id, or each entry of a dimension, whether it is kept."""

FIXED = 0

PAIRED = "pairs channels with something that is whole; they stay whole"
TIED = "ties all channels of a dimension to each other; they stay whole"


def varying(factor: Array) -> list[int]:
    """Return the dimensions that a factor varies over."""
    return [dim for dim, size in enumerate(factor.shape) if size > 1]


def spread(labels: Array, dim: int, rank: int) -> Array:
    """Return 1-D labels (n,) as a factor of a tensor of `rank` dimensions, along one of them."""
    return labels.reshape([-1 if d == dim % rank else 1 for d in range(rank)])


Place = tuple[str, str]
"""An operation and the path of the module that runs it."""


class Notes:
    """What is left whole: for each operation and reason, the modules in which it is."""

    def __init__(self) -> None:
        self.place: Place = ("", "")  # Where the trace is,
        self.in_layer = False  # and whether that is in a module without others inside.
        self.made: list[tuple[str, str, str]] = []  # Operation, reason and module, in order.

    def add(self, why: str, place: Place | None = None) -> None:
        """Note a reason, where the trace is or at another place; each once.

        That something is paired with what is whole says little where a single layer has made it
        whole, as when it standardises its weights.
        """
        operation, module = place or self.place
        if why == PAIRED and self.in_layer and module in {other for _, _, other in self.made}:
            return
        if (operation, why, module) not in self.made:
            self.made.append((operation, why, module))

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each operation and reason, in the order of the first of them."""
        places: dict[tuple[str, str], list[str]] = {}
        for operation, why, module in self.made:
            places.setdefault((operation, why), []).append(module or "the model")
        found = []
        for (operation, why), (first, *others) in places.items():
            where = f"{operation} in {first}" if operation else first
            more = ", ".join(others[:2]) + f" and {len(others) - 2} more" * (len(others) > 2)
            found.append(f"{where} {why}" + (f" (also {more})" if others else ""))
        return tuple(found)


class Labels:
    """Unified labels (a union-find on arrays) and the factors of every tensor seen."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.layer: object = None  # The module whose forward is under way.
        # The tensors that were computed from the model's inputs, and not from weights only.
        self.from_inputs: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        # What was computed from buffers and no weights, such as the angles of rotary positions.
        self.tables: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        # Squares of other tensors, and for a mean of squares over channels, the labels of those.
        self.squares: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.averaged: MutableMapping[Tensor, Array] = WeakTensorKeyDictionary()
        self._parent = np.zeros(1, dtype=np.int64)
        self._factors: MutableMapping[Tensor, list[Array]] = WeakTensorKeyDictionary()
        self._loud: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._joint: list[Array] = []
        self._ties: list[tuple[Array, Place]] = []

    # ---- sets

    @property
    def count(self) -> int:
        """How many labels there are."""
        return len(self._parent)

    def add(self, tensor: Tensor, dims: Sequence[int] | None = None) -> None:
        """Give every coordinate of some dimensions of a tensor, or of all, a label of its own."""
        factors = []
        for dim in range(tensor.ndim) if dims is None else dims:
            if (size := tensor.shape[dim]) > 1:
                fresh = np.arange(size) + len(self._parent)
                self._parent = np.concatenate([self._parent, fresh])
                factors.append(spread(fresh, dim, tensor.ndim))
        self.put(tensor, factors)

    def find(self, labels: Array) -> Array:
        """Return the representative of each label's set: its smallest member."""
        roots = self._parent[labels]
        while not np.array_equal(above := self._parent[roots], roots):
            roots = above
        self._parent[labels] = roots
        return roots

    def union(self, left: Array, right: Array) -> None:
        """Unify two arrays of labels entry by entry, after broadcasting."""
        left, right = np.broadcast_arrays(left, right)
        while True:
            left, right = self.find(left), self.find(right)
            differ = left != right
            if not differ.any():
                return
            # Larger roots hang under smaller ones, so there are no cycles and FIXED stays a root.
            # A root that is to hang under several takes the smallest; the next turn sees the rest.
            low, high = np.minimum(left, right)[differ], np.maximum(left, right)[differ]
            np.minimum.at(self._parent, high, low)

    def fix(self, labels: Array, why: str = "") -> None:
        """Keep these labels always; with a reason, say so in the notes."""
        if why and (self.find(labels) != FIXED).any():
            self.notes.add(why)
        self.union(labels, np.zeros(1, dtype=np.int64))

    def tie(self, labels: Array, first: Array) -> None:
        """Unify labels of one dimension with its first ones, and remember where that was."""
        if (self.find(labels) != self.find(first)).any():
            self._ties.append((first.ravel(), self.notes.place))
            self.union(labels, first)

    # ---- tensors

    def reduced(self, factor: Array) -> Array:
        """Return a factor in representatives, of size 1 where it no longer varies."""
        factor = self.find(factor)
        for dim in varying(factor):
            first = factor.take([0], dim)
            if (factor == first).all():
                factor = first
        if factor.size == 1 and factor.flat[0] != FIXED:
            # One set fills the dimension. To drop it would leave a tensor without entries.
            for tied, place in reversed(self._ties):
                if factor.flat[0] in self.find(tied):
                    self.notes.add(TIED, place)
                    break
            self.fix(factor)
        return factor

    def of(self, tensor: Tensor) -> list[Array]:
        """Return a tensor's factors, each reduced to the dimensions that it truly varies over."""
        found = (self.reduced(factor) for factor in self._factors.get(tensor, ()))
        return [factor for factor in found if factor.size > 1]

    def put(self, tensor: Tensor, factors: Sequence[Array], loud: bool = False) -> None:
        """Set a tensor's factors, and whether it is loud."""
        self._factors[tensor] = list(factors)
        self._loud[tensor] = loud

    def loud(self, tensor: Tensor) -> bool:
        """Tell whether a tensor may be other than zero where its channels are dropped."""
        return self._loud.get(tensor, False)

    def set_loud(self, tensor: Tensor, loud: bool) -> None:
        """Set whether a tensor is loud."""
        self._loud[tensor] = loud

    def along(self, tensor: Tensor, dim: int) -> Array | None:
        """Return the labels (n,) along a dimension, or None if it is kept as a whole.

        If the factor varies over other dimensions too, the entries along those are unified: to ask
        for the labels inside a head is to decide that all heads keep the same entries.
        """
        dim %= tensor.ndim
        for factor in self.of(tensor):
            if factor.shape[dim] > 1:
                for other in varying(factor):
                    if other != dim:
                        self.tie(factor, factor.take([0], other))
                lone = self.reduced(factor)
                return lone.ravel() if lone.size > 1 else None
        return None

    def keep_whole(self, tensor: Tensor, dim: int, why: str = "") -> None:
        """Decide that nothing is dropped along a dimension.

        A factor that varies over other dimensions too stays free there; one that varies over this
        dimension only becomes fixed, which is noted if a reason is given.
        """
        dim %= tensor.ndim
        for factor in self.of(tensor):
            if factor.shape[dim] > 1:
                if len(varying(factor)) > 1:
                    self.tie(factor, factor.take([0], dim))
                else:
                    self.fix(factor, why)

    def meet(self, left: Array | None, right: Array | None, *, why: Sequence[str] = "") -> None:
        """Unify the labels of two dimensions that are paired; what is whole makes the other whole.

        Labels are (n,), or None for a dimension that is whole; `why` has, for each dimension, the
        note to make if some of its labels become fixed.
        """
        for one, other, reason in zip((left, right), (right, left), why, strict=False):
            if one is not None and reason:
                fixed = True if other is None else self.find(other) == FIXED
                if ((self.find(one) != FIXED) & fixed).any():
                    self.notes.add(reason)
        if left is not None and right is not None:
            self.union(left, right)
        for one, other in ((left, right), (right, left)):
            if one is not None and other is None:
                self.fix(one)

    def pair(self, left: Tensor, left_dim: int, right: Tensor, right_dim: int) -> Array | None:
        """Unify the labels of two tensors along a dimension of each, and return them.

        A tensor that was computed from the model's inputs and becomes whole by this is noted.
        Weights are not: what they read is whole, so there is nothing to cut.
        """
        sides = self.along(left, left_dim), self.along(right, right_dim)
        self.meet(*sides, why=[PAIRED if t in self.from_inputs else "" for t in (left, right)])
        return None if sides[1] is None else sides[0]

    def split_later(self, factor: Array) -> None:
        """Remember a dimension that was split into several, for `resolve`."""
        if len(varying(factor)) > 1:
            self._joint.append(factor)

    def resolve(self) -> None:
        """Decide splits that no operation decided: entries inside the last dimension are cut.

        Otherwise (heads, size) could lose different numbers of entries in different heads, which
        no tensor can express.
        """
        for joint in self._joint:
            factor = self.reduced(joint)  # Most were decided by whatever read them.
            for other in varying(factor)[:-1]:
                self.tie(factor, factor.take([0], other))
            self.reduced(factor)


Rule = Callable[..., None]
"""From the labels, the result of an operation and its arguments, all positional."""


class Rules(dict[str, Rule]):
    """Rules by the names of operations in `torch.ops.aten`, without a final underscore."""

    def add(self, *names: str) -> Callable[[Rule], Rule]:
        """Return a decorator that registers a rule for these operations."""

        def register(rule: Rule) -> Rule:
            self.update(dict.fromkeys(names, rule))
            return rule

        return register
