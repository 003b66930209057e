"""Sizes that modules store: told to a narrow copy after its tensors were cut.

`resize` has a rule for each class, which users extend; a file here is a family of layers. What
comes from libraries that need not be installed is known by its names instead, see `heads`.
"""

from sizewise.cutting.sizes import recurrent, timm_layers, torch_layers, transformers_layers
from sizewise.cutting.sizes.heads import Cut
from sizewise.cutting.sizes.registry import resize

__all__ = ["Cut", "follow", "resize"]

_RULED = (recurrent, torch_layers)  # Imported for the rules that they register.


def follow(cut: Cut) -> None:
    """Update what a narrow module stores about its sizes, by its class or by its names."""
    rule = resize.dispatch(type(cut.full))
    rule(cut.narrow, cut.full)
    if rule is resize.dispatch(object):
        for family in (*transformers_layers.ATTENTION, *timm_layers.ATTENTION):
            family.follow(cut)
        transformers_layers.transposed_linear(cut)
