"""The classes of transformers themselves, tiny: cut nearly whole, and right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sizewise.cutting import keep, random, shrink, trace, verify

transformers = pytest.importorskip("transformers")

# DeBERTa's file uses torch.jit.script when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

TEXT: dict[str, Any] = {
    **{"vocab_size": 50, "pad_token_id": 0, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 40},
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
MODELS: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "Llama": {**TEXT, "num_key_value_heads": 2},
    "Qwen2": {**TEXT, "num_key_value_heads": 2},
    "Qwen3": {**TEXT, "num_key_value_heads": 2, "head_dim": 8},
    "GPTNeoX": TEXT,
    "T5Encoder": {
        **{"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    },
    "Bloom": {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "DebertaV2": {**TEXT, **RELATIVE},
    "Mamba": {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Segformer": {
        **{"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
        **{"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    },
}


class Pooled(nn.Module):
    """A classifier by the mean of what a backbone gives."""

    def __init__(self, name: str) -> None:
        super().__init__()
        options = MODELS[name] if name == "Segformer" else {**MODELS[name], "use_cache": False}
        config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**options)
        self.backbone = getattr(transformers, f"{name}Model")(config)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone(x).last_hidden_state
        result: Tensor = self.head(hidden.mean((2, 3)) if hidden.ndim == 4 else hidden.mean(1))
        return result


def inputs(name: str) -> Tensor:
    if name == "Segformer":
        return torch.empty(2, 3, 32, 32, device="meta")
    return torch.empty(2, 7, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("name", MODELS)
def test_nearly_all_of_a_model_is_cut_and_right(name: str) -> None:
    model = Pooled(name)
    channels = trace(model, inputs(name))
    assert channels.cut_share > 0.98
    for kept in (
        keep(channels, 1 / 4),
        keep(channels, 1 / 2, random(torch.Generator().manual_seed(2))),
    ):
        assert verify(model, channels, kept) < 1e-9


@pytest.mark.parametrize(
    ("name", "path", "sizes"),
    [
        ("GPT2", "h.0.attn", {"num_heads": 4, "head_dim": 2, "split_size": 8}),
        ("GPT2", "h.0.mlp.c_fc", {"nx": 8, "nf": 32}),
        ("Llama", "layers.0.self_attn", {"head_dim": 8, "num_key_value_groups": 2}),
        ("Bloom", "h.0.self_attention", {"num_heads": 4, "head_dim": 2}),
        (
            *("T5Encoder", "encoder.block.0.layer.0.SelfAttention"),
            {"n_heads": 4, "key_value_proj_dim": 2, "inner_dim": 8},
        ),
    ],
)
def test_sizes_at_a_quarter(name: str, path: str, sizes: dict[str, int]) -> None:
    model = Pooled(name)
    channels = trace(model, inputs(name))
    small = shrink(model, channels, keep(channels, 1 / 4))
    found = vars(small.get_submodule(f"backbone.{path}"))
    assert {size: found[size] for size in sizes} == sizes


def test_a_model_that_decides_by_its_token_ids_is_traced_if_that_changes_nothing() -> None:
    """DeBERTa looks for padding, to warn; no channel depends on it."""
    assert trace(Pooled("DebertaV2"), inputs("DebertaV2")).cut_share > 0.98
