"""How many channels a narrower model keeps.

Papers agree on "ratio times channels" and differ in the rounding; the difference is visible:
a sixth of PreResNet-20 is (3, 6, 11) channels in HeteroFL, which rounds up, and (2, 5, 10) in
SplitMix, which rounds down. So the rule has a name and every width in sizewise comes from here.
"""

import math
from fractions import Fraction

from sizewise.errors import ModelError, NoChannelLeft

RULES = ("floor", "floor_min1", "ceil")

# Ratios are often built in floating point: 5 * (3 * 0.2) is 3.0000000000000004, which must not
# round up to 4, and 10 * (0.7 / 0.1) is 69.99999999999999, which must not round down to 69.
_GUARD = 1e-9


def scaled(channels: int, ratio: float, rule: str = "floor") -> int:
    """Return how many of a layer's channels are kept at a width ratio.

    Args:
        channels: Channels of the layer at ratio 1.
        ratio: Fraction of the channels to keep; above 1 widens.
        rule: `"floor"` rounds down and refuses to keep nothing (SLT, SplitMix); `"floor_min1"`
            rounds down but keeps at least one channel (SLT's narrow head); `"ceil"` rounds up
            (HeteroFL, FedRolex, FjORD, NeFL).

    Raises:
        NoChannelLeft: No channel would be left.
        ModelError: The rule is unknown, or the ratio is not positive.
    """
    _check_ratio(ratio)
    if channels < 1:
        raise ModelError(f"a layer has at least one channel; {channels} came")
    if rule not in RULES:
        raise ModelError(f"the width rounding is one of {', '.join(RULES)}; {rule!r} came")
    if rule == "ceil":
        return max(math.ceil(channels * ratio - _GUARD), 1)
    kept = math.floor(channels * ratio + _GUARD)
    if kept == 0 and rule == "floor":
        raise NoChannelLeft(
            f"width {ratio:g} leaves none of {channels} channels; use a width of at least "
            f"{1 / channels:.3g}, or rounding 'ceil' or 'floor_min1'"
        )
    return max(kept, 1)


def named(ratio: float) -> str:
    """Return a ratio as people write it; different ratios have different names.

    Four digits if that is the number, else a fraction such as 1/3 if that is, else all digits.
    """
    if float(short := f"{ratio:.4g}") == ratio:
        return short
    simple = Fraction(ratio).limit_denominator(100)
    return str(simple) if float(simple) == ratio else repr(ratio)


def scaled_growth(channels: int, growth: int, ratio: float, rule: str = "floor") -> int:
    """Return the new channels a dense layer adds to its input at a width ratio.

    It is a difference of running totals, not `scaled(growth)`, so that the sum over layers is the
    scaled sum: the input of every later layer then has exactly `scaled(total)` channels. At ratio
    1 the layer adds `growth` channels to `channels`; all else is as in `scaled`.
    """
    kept = scaled(channels + growth, ratio, rule) - scaled(channels, ratio, rule)
    if kept == 0:
        raise NoChannelLeft(
            f"width {ratio:g} leaves none of the {growth} channels that a dense layer adds; "
            f"use a width of at least {1 / growth:.3g}"
        )
    return kept


def scaled_to_heads(dim: int, ratio: float, heads: int) -> int:
    """Return the width of an attention embedding at a ratio; as many heads, each of them thinner.

    It is `dim` at ratio 1, and always a multiple of the heads.
    """
    _check_ratio(ratio)
    return max(math.ceil(dim * ratio / heads - _GUARD), 1) * heads


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio < math.inf:
        raise ModelError(f"a width ratio is a positive number such as 0.25; {ratio} came")
