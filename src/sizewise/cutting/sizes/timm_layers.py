"""Layers of timm."""

from sizewise.cutting.sizes.heads import Attention

ATTENTION = (
    Attention(
        projection=("qkv", "q", "q_proj"),
        size=("head_dim", "dim_head"),
        count=("num_heads",),
        total=("attn_dim", "dim", "inner_dim", "all_head_dim", "dim_out"),
    ),
)
