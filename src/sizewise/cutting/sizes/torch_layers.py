"""The layers of torch."""

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sizewise.cutting.sizes.registry import resize
from sizewise.errors import ModelError


@resize.register
def _(narrow: nn.Linear, full: nn.Linear) -> None:
    narrow.out_features, narrow.in_features = narrow.weight.shape


@resize.register
def _(narrow: _ConvNd, full: _ConvNd) -> None:
    if full.groups > 1:  # Whole groups are dropped, and with them their share of the outputs.
        narrow.groups = full.groups * narrow.weight.shape[0] // full.weight.shape[0]
    narrow.out_channels = narrow.weight.shape[0]
    narrow.in_channels = narrow.weight.shape[1] * narrow.groups


@resize.register
def _(narrow: _ConvTransposeNd, full: _ConvTransposeNd) -> None:
    # Groups of these are never cut.
    narrow.in_channels = narrow.weight.shape[0]
    narrow.out_channels = narrow.weight.shape[1] * narrow.groups


@resize.register
def _(narrow: nn.Embedding, full: nn.Embedding) -> None:
    narrow.num_embeddings, narrow.embedding_dim = narrow.weight.shape


@resize.register
def _(narrow: nn.MultiheadAttention, full: nn.MultiheadAttention) -> None:
    outer, inner = narrow.out_proj.weight.shape
    if outer != inner:
        raise ModelError(
            f"nn.MultiheadAttention needs heads that add up to its embedding, but {outer} "
            f"dimensions and {narrow.num_heads} heads of {inner // narrow.num_heads} would be "
            "kept; choose a ratio at which both are equal"
        )
    narrow.embed_dim = narrow.kdim = narrow.vdim = outer
    narrow.head_dim = outer // narrow.num_heads
