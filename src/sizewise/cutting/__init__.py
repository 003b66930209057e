"""Narrower models out of any `nn.Module`: found by tracing, cut, and checked.

    channels = trace(model, torch.empty(2, 3, 32, 32))    # dimensions that must be cut together
    kept = keep(channels, 0.25)                           # which channels stay
    small = shrink(model, channels, kept)                 # a real, smaller module
    verify(model, channels, kept)                         # it computes what the masked model does

Start with `channels`; `layer_rules` and `shape_rules` say what each operation does to channels, and
`sizes` tells layers that store sizes their new ones.
Imports `torch_tools` and the views of `exchange`.
"""

from sizewise.cutting.channels import Channels, trace
from sizewise.cutting.selection import keep, prefix, random, rolling
from sizewise.cutting.shrinking import resize, shrink, view
from sizewise.cutting.verification import verify

__all__ = [
    "Channels",
    "keep",
    "prefix",
    "random",
    "resize",
    "rolling",
    "shrink",
    "trace",
    "verify",
    "view",
]
