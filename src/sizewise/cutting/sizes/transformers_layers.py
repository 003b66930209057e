"""Layers of Hugging Face's transformers."""

from sizewise.cutting.sizes.heads import Attention, Cut

ATTENTION = (
    # BERT, ViT, DeBERTa, Llama, T5 and their kin. Which sizes they use differs; those that they
    # only store do no harm.
    Attention(
        projection=("query", "q_proj", "q_lin", "q", "query_proj"),
        keys=("key", "k_proj", "k_lin", "k", "key_proj"),
        size=("attention_head_size", "head_dim", "key_value_proj_dim"),
        count=("num_attention_heads", "num_heads", "n_heads"),
        key_count=("num_key_value_heads",),
        total=("all_head_size", "inner_dim", "embed_dim"),
    ),
    # Queries, keys and values in one: Bloom, GPT-NeoX, Falcon, DeBERTa.
    Attention(
        projection=("query_key_value", "in_proj", "qkv_proj", "Wqkv"),
        size=("head_dim", "head_size", "attention_head_size"),
        count=("num_heads", "num_attention_heads"),
        total=("hidden_size", "all_head_size", "split_size"),
    ),
    # GPT-2, whose weights lie the other way round.
    Attention(
        projection=("c_attn",),
        outputs=1,
        size=("head_dim",),
        count=("num_heads",),
        total=("split_size", "embed_dim"),
    ),
)


def transposed_linear(cut: Cut) -> None:
    """Update GPT-2's linear layer, which is called Conv1D."""
    if type(cut.full).__name__ == "Conv1D" and type(cut.full).__module__.startswith("transformers"):
        vars(cut.narrow).update(
            zip(("nx", "nf"), cut.narrow.get_parameter("weight").shape, strict=True)
        )
