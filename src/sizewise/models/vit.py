"""Vision transformers.

Dosovitskiy et al.: "An Image is Worth 16x16 Words", ICLR 2021 (https://arxiv.org/abs/2010.11929),
in the sizes of Touvron et al.: "Training data-efficient image transformers", ICML 2021
(https://arxiv.org/abs/2012.12877). FeDepth fine-tunes ViT-Tiny, NeFL ViT-Base.

A width ratio keeps the number of heads and makes every head thinner, so attention logits are
divided by the square root of the thinner head's size.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.common.widths import scaled_to_heads
from sizewise.errors import ModelError
from sizewise.models.common import chain
from sizewise.surgery.anatomy import Staged
from sizewise.surgery.step_sizes import Branch


class PatchEmbedding(nn.Module):
    """Cuts images into square patches and turns them into tokens behind a class token."""

    def __init__(self, image: tuple[int, int, int], patch: int, dim: int, dropout: float) -> None:
        super().__init__()
        channels, height, width = image
        tokens = (height // patch) * (width // patch)
        self.conv = nn.Conv2d(channels, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, 1 + tokens, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens (batch, 1 + patches, dim)."""
        patches = self.conv(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1)
        out: Tensor = self.dropout(tokens + self.position)
        return out


class Attention(nn.Module):
    """Self-attention with separate query, key and value maps."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, tokens, dim) to the same shape."""
        # The size of a head is read off the tensor, never stored: a model cut to thinner heads
        # runs through the same code.
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each on normalised tokens and added to the stream."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.branch1 = Branch()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = chain(
            linear1=nn.Linear(dim, hidden),
            gelu=nn.GELU(),
            linear2=nn.Linear(hidden, dim),
            dropout=nn.Dropout(dropout),
        )
        self.branch2 = Branch()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, tokens, dim) to the same shape."""
        x = x + self.branch1(self.attention(self.norm1(x)))
        out: Tensor = x + self.branch2(self.mlp(self.norm2(x)))
        return out


class ClassToken(nn.Module):
    """Picks the class token."""

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, tokens, dim) to (batch, dim)."""
        return x[:, 0]


def vit(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    patch: int = 0,
    dim: int = 64,
    depth: int = 6,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
) -> Staged:
    """Return a vision transformer.

    Args:
        classes: Outputs.
        image: Shape of one image, (channels, height, width), a multiple of the patch.
        width: Ratio that scales the embedding by `widths.scaled_to_heads`, and the rest with it.
        patch: Side of a patch; 0 chooses 4 for images up to 64 pixels and 16 above.
        dim: Width of the embedding, a multiple of `heads`.
        depth: Number of blocks.
        heads: Attention heads, kept at every width.
        mlp_ratio: Hidden units of a block's perceptron per embedding dimension.
        dropout: Probability, after the embedding, each attention and each perceptron.
    """
    patch = patch or (4 if max(image[1:]) <= 64 else 16)
    if patch < 1 or any(side % patch for side in image[1:]):
        raise ModelError(
            f"patches of {patch}x{patch} do not tile images of {image[1]}x{image[2]}; "
            "choose a patch that divides both sides"
        )
    if min(dim, depth, heads, mlp_ratio) <= 0 or dim % heads:
        raise ModelError(
            "a vit needs positive dim, depth, heads and mlp_ratio, and a dim that heads divides; "
            f"dim {dim}, depth {depth}, heads {heads}, mlp_ratio {mlp_ratio} came"
        )
    dim = scaled_to_heads(dim, width, heads)
    hidden = max(round(dim * mlp_ratio), 1)
    model = Staged(
        stem=PatchEmbedding(image, patch, dim, dropout),
        blocks=(EncoderBlock(dim, heads, hidden, dropout) for _ in range(depth)),
        head=chain(token=ClassToken(), norm=nn.LayerNorm(dim), linear=nn.Linear(dim, classes)),
    )
    # Drawn from a normal of deviation 0.02, cut off at 2 as DeiT does; biases are zero.
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            nn.init.trunc_normal_(parameter, std=0.02)
    return model


def of_twelve_blocks(
    dim: int,
    heads: int,
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    patch: int = 0,
    dropout: float = 0.0,
) -> Staged:
    """Return a vision transformer of a published size; arguments as for `vit`."""
    sizes = {"dim": dim, "depth": 12, "heads": heads}
    return vit(classes=classes, image=image, width=width, patch=patch, dropout=dropout, **sizes)


vit_tiny = partial(of_twelve_blocks, 192, 3)
vit_base = partial(of_twelve_blocks, 768, 12)
