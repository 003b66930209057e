"""Groups of channels, as a trace finds them: what may be cut, and what cannot be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sizewise.cutting.tracer import Step
from sizewise.cutting.union_find import Array, Mask
from sizewise.errors import ModelError

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
