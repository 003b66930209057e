"""Attention that stores how many heads it has, and how large they are.

Libraries have a class of it for every model. These are known by what they call their parts and
sizes, so that no library need be installed or imported; each has a file with its names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from sizewise.cutting.union_find import Mask


@dataclass(frozen=True)
class Cut:
    """A module that was cut.

    Attributes:
        narrow: The copy that holds the cut tensors.
        full: The module in the full model.
        kept: From the name of one of its tensors, and a dimension, to which entries are kept.
    """

    narrow: nn.Module
    full: nn.Module
    kept: Callable[[str, int], Mask]


@dataclass(frozen=True)
class Attention:
    """What a family of attention calls its parts and sizes.

    Attributes:
        projection: Names of the layer that makes queries, perhaps with keys and values in one.
        keys: Names of the layer that makes keys, where they have heads of their own.
        outputs: Which dimension of its weight has the outputs.
        size: Names of the size of a head.
        count: Names of the number of heads.
        key_count: Names of the number of heads of keys and values.
        total: Names of the size of all heads together.
    """

    projection: tuple[str, ...]
    keys: tuple[str, ...] = ()
    outputs: int = 0
    size: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    key_count: tuple[str, ...] = ()
    total: tuple[str, ...] = ()

    def follow(self, cut: Cut) -> None:
        """Update the sizes of a module if it is attention of this family."""
        size = next((n for name in self.size if (n := _stored(cut.full, name))), 0)
        for names, counts in ((self.projection, self.count), (self.keys, self.key_count)):
            kept = next((k for name in names if (k := self._outputs(cut, name)) is not None), None)
            if kept is None or kept.all():
                continue
            # Heads are dropped as a whole, or all of them become smaller.
            by_head = kept.reshape(-1, size) if size and len(kept) % size == 0 else kept[None]
            whole = bool(np.all(by_head == by_head[:, :1]))
            scaled = counts if whole else self.size if counts == self.count else ()
            for name in (*scaled, *(self.total if counts == self.count else ())):
                if number := _stored(cut.full, name):
                    vars(cut.narrow)[name] = number * int(kept.sum()) // len(kept)

    def _outputs(self, cut: Cut, name: str) -> Mask | None:
        """Return which outputs of a layer are kept; None if there is no such layer."""
        weight = getattr(getattr(cut.full, name, None), "weight", None)
        known = isinstance(weight, Tensor) and weight.ndim > self.outputs
        return cut.kept(f"{name}.weight", self.outputs) if known else None


def _stored(module: nn.Module, name: str) -> int:
    """Return a size that a module stores; 0 if it stores none by that name."""
    value = vars(module).get(name)
    return value if type(value) is int else 0
