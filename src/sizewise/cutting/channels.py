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
without a rule reads, or that a module counts by a size that it stored: `Channels.notes` names
these. A dimension that is split into heads is cut inside every head, the same entries in all, so
the number of heads stays; unless something tells these entries apart, as rotary positions do: then
whole heads are dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from sizewise.cutting.checking import Misfit
from sizewise.cutting.groups import WHOLE, Channels, Group, Kept
from sizewise.cutting.selection import keep
from sizewise.cutting.shrinking import shrink
from sizewise.cutting.tracing import Whole, traced
from sizewise.errors import ModelError
from sizewise.torch_tools.dry_run import MetaMode, on_meta

__all__ = ["WHOLE", "Channels", "Group", "Kept", "trace"]

JOINED = "keeps a residual stream at one width; it does not run where that changes on the way"


def trace(model: nn.Module, *inputs: Tensor, loose: bool = False) -> Channels:
    """Find out which dimensions of a model's tensors hang together.

    Both modes are traced, so that what runs in training only is understood as well. A narrow copy
    is tried, without data: a module in which it fails, because its forward uses sizes that it
    stored, is left whole, which is noted, and the rest is still cut.

    Args:
        model: Any module; it is left as it was.
        inputs: What its forward takes, such as images (B, C, H, W). Only shapes and types matter,
            so meta tensors will do.
        loose: Let a residual stream become narrower from block to block: what a block adds to the
            stream is then a group of its own, and the sum has its channels; a model that is cut so
            drops the others from the shortcut.

    Raises:
        ModelError: The model cannot be copied, or cannot run on such inputs without data, or
            nothing is left to cut because no narrow copy would run.
    """
    channels = _settled(model, inputs, loose)
    # What narrows on the way may not run where a forward notes the width that it begins with.
    if channels.loose and _misfit(model, channels, partial(_later, channels)) is not None:
        channels = _settled(model, inputs, loose, joined=True)
        note = f"{type(model).__name__} {JOINED}"
        channels = replace(channels, notes=(*channels.notes, note))
    return channels


def _settled(
    model: nn.Module, inputs: Sequence[Tensor], loose: bool, joined: bool = False
) -> Channels:
    """Trace a model again and again, until a narrow copy runs."""
    channels = traced(model, inputs, loose, joined=joined)
    first = misfit = _misfit(model, channels, 0.5)
    whole: dict[Whole, None] = {}
    while first is not None and misfit is not None:
        more = (found for found in _blamed(model, misfit) if set(found) - set(whole))
        blamed = next(more, ())
        whole.update(dict.fromkeys(blamed))
        channels = traced(model, inputs, loose, whole, joined)
        if not blamed or not channels.groups:
            raise first
        misfit = _misfit(model, channels, 0.5)
    return channels


def _later(channels: Channels, group: Group) -> float:
    return 1.0 if group.index < len(channels.groups) / 2 else 0.5


def _misfit(
    model: nn.Module, channels: Channels, ratio: float | Callable[[Group], float]
) -> Misfit | None:
    """Return how a narrow copy fails, if it does because of sizes that a module stores."""
    if not channels.groups:
        return None
    try:
        with MetaMode():
            shrink(on_meta(model), channels, keep(channels, ratio))
    except Misfit as misfit:
        return misfit
    except ModelError:
        pass  # That is about this ratio; whoever chooses one is told.
    return None


def _blamed(model: nn.Module, misfit: Misfit) -> Iterator[Sequence[Whole]]:
    """Yield what may be left whole after a failure in a module, more and more of it.

    First the inside of all modules of its class, then also what it reads, then the same of the
    modules that it is in. Layers of torch do as they are told by those that they are in. Of the
    model itself, the results around the failure come first.
    """
    modules, path = dict(model.named_modules()), misfit.module
    while path:
        if not type(modules[path]).__module__.startswith("torch."):
            kind = type(modules[path])
            alike = [p for p, module in modules.items() if type(module) is kind]
            yield [Whole(other) for other in alike]
            yield [Whole(path, reads=True)]
            yield [Whole(other, reads=True) for other in alike]
        path = path.rpartition(".")[0]
    for reach in (0, 1):
        near = range(misfit.step - reach, misfit.step + reach + 1)
        yield [Whole("", step=(misfit.training, number)) for number in near]
    yield [Whole("", reads=True)]
