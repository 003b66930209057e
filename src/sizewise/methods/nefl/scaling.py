"""Which submodels there are: fewer channels, fewer blocks, or both.

A share is a fraction of the model's parameters, which grow with the square of the channels and with
the number of blocks. So `width` keeps sqrt(share) of the channels; `depth` keeps the first blocks
of every stage, about that share of them; `both` takes the root of the share from each. Papers name
their submodels; `published` has NeFL's tables (docs/methods/nefl.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sizewise.common.widths import scaled_to_heads
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Submodel

Scaling = Literal["width", "depth", "both"]


@dataclass(frozen=True)
class Scaled(Submodel):
    """What a submodel keeps.

    Attributes:
        width: Ratio of channels.
        blocks: Numbers of the blocks, ascending; None is all of them.
        label: What people call it, and the server what it keeps for it alone.
    """

    width: float = 1.0
    blocks: tuple[int, ...] | None = None
    label: str = "full"

    @property
    def shape_key(self) -> "Scaled":
        """Shapes do not depend on the label."""
        return Scaled(self.width, self.blocks)


def scaled(share: float, scaling: Scaling, stages: Sequence[range]) -> Scaled:
    """Return the submodel with about a share of the parameters.

    Args:
        share: Fraction of the parameters, above 0 and at most 1.
        scaling: What becomes smaller.
        stages: The model's blocks, stage by stage; at least the first of each stays.
    """
    deep = {"width": 1.0, "depth": share, "both": math.sqrt(share)}[scaling]
    blocks = tuple(n for stage in stages for n in stage[: max(1, round(deep * len(stage)))])
    kept = len(blocks) / max(1, sum(map(len, stages)))
    # Where more blocks had to stay than were meant to, there are fewer channels instead.
    width = 1.0 if scaling == "depth" else math.sqrt(share / max(deep, kept))
    return Scaled(width, blocks if 0 < kept < 1 else None)


def published(model: str, scaling: Scaling) -> list[Scaled]:
    """Return NeFL's submodels of a network, smallest first; the last is the network itself.

    Raises:
        ConfigError: The paper has none for it.
    """
    fifths = [(share, "") for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    tables = {
        "width": {name: fifths for name in _DEPTH if name.startswith("resnet")},
        "depth": {name: [(1.0, kept) for kept in masks] for name, masks in _DEPTH.items()},
        "both": _BOTH,
    }
    if model not in tables[scaling]:
        raise ConfigError(
            f"the paper has no submodels of {model!r} for method.scaling = {scaling!r}, only of "
            f"{', '.join(sorted(tables[scaling]))}; turn method.published off"
        )
    heads = _HEADS.get(model)
    found = [(math.sqrt(share), _blocks(kept)) for share, kept in tables[scaling][model]]
    if heads is None:
        return [Scaled(width, blocks) for width, blocks in found]
    # The embedding is a multiple of the heads, and all else in proportion to what it is then.
    return [Scaled(scaled_to_heads(heads[0], w, heads[1]) / heads[0], kept) for w, kept in found]


def _blocks(kept: str) -> tuple[int, ...] | None:
    """Return the positions of the ones in a mask such as "11 00 11 00"; None if all are."""
    mask = kept.replace(" ", "")
    return tuple(n for n, one in enumerate(mask) if one == "1") if "0" in mask else None


def _first(counts: Sequence[int], lengths: Sequence[int]) -> str:
    return " ".join("1" * n + "0" * (m - n) for n, m in zip(counts, lengths, strict=True))


_WIDE = [3, 4, 23, 3]

_HEADS = {"vit_base": (768, 12)}
"""The width of the embedding, and the number of heads, of networks with attention."""

_DEPTH: dict[str, list[str]] = {
    "resnet18": ["11 00 11 00", "11 11 00 10", "11 11 11 10", "10 11 00 11", ""],
    "resnet34": [
        "100 1000 100000 100",
        "111 1111 110001 100",
        "111 1111 110001 101",
        "111 1001 110001 111",
        "",
    ],
    "resnet56": [
        _first(counts, [9] * 3)
        for counts in ((2, 2, 2), (3, 3, 4), (4, 4, 6), (9, 8, 7), (9, 9, 9))
    ],
    "resnet110": [
        _first(counts, [18] * 3)
        for counts in ((16, 4, 3), (14, 7, 7), (17, 13, 10), (16, 16, 14), (18, 18, 18))
    ],
    "vit_base": [_first([count], [12]) for count in (6, 9, 12)],
    "wide_resnet101_2": [
        _first([3, 4, third, fourth], _WIDE) for third, fourth in ((9, 2), (14, 3), (23, 3))
    ],
}

_BOTH: dict[str, list[tuple[float, str]]] = {
    "resnet18": [(0.34, "11 11 11 10"), (0.4, ""), (0.6, ""), (0.8, ""), (1.0, "")],
    "resnet34": [
        (0.378, "111 1001 100001 101"),
        (0.625, "111 1001 111001 101"),
        (0.771, "111 1111 111111 101"),
        (0.900, "111 1111 111001 111"),
        (1.0, ""),
    ],
    "resnet56": [
        (share, _first([count] * 3, [9] * 3))
        for share, count in zip((0.465, 0.608, 0.777, 0.903, 1.0), (4, 6, 7, 8, 9), strict=True)
    ],
    "resnet110": [
        (share, _first([count] * 3, [18] * 3))
        for share, count in zip((0.457, 0.604, 0.774, 0.901, 1.0), (8, 12, 14, 16, 18), strict=True)
    ],
    "vit_base": [
        (share, _first([count], [12]))
        for share, count in zip((0.747, 0.899, 1.0), (8, 10, 12), strict=True)
    ],
}
