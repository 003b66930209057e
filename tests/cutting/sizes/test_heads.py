"""Attention that stores sizes, written out in each of its ways, beside a slow masked model.

The oracle shares no code with `verify`: a copy of the full model whose dropped entries are zero,
and whose norms are told which channels exist.
"""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from dropped_entries import drop_entries
from sizewise.cutting import keep, prefix, random, rolling, shrink, trace, verify, view
from sizewise.cutting.groups import Channels
from sizewise.exchange.view import TensorSlice

TOKENS, SIZE, STREAM = 5, 8, 24


class RmsNorm(nn.Module):
    """An RMS norm, written out; `alive` says which channels the oracle's has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(STREAM))
        self.alive: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.alive is None:
            mean = x.pow(2).mean(-1, keepdim=True)
        else:
            mean = (x.pow(2) * self.alive).sum(-1, keepdim=True) / self.alive.sum()
        return self.weight * (x * torch.rsqrt(mean + 1e-6))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Attention (B, heads, T, size) with a scale that depends on no size."""
    return (query @ key.transpose(-2, -1) * 0.3 + bias).softmax(-1) @ value


def together(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Llama's: rotary positions, and fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.groups = SIZE, 2
        self.q_proj, self.o_proj = nn.Linear(STREAM, 8 * SIZE), nn.Linear(8 * SIZE, STREAM)
        self.k_proj, self.v_proj = nn.Linear(STREAM, 4 * SIZE), nn.Linear(STREAM, 4 * SIZE)
        self.register_buffer("frequencies", 1 / 100 ** (torch.arange(0, SIZE, 2) / SIZE))

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(TOKENS)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def repeated(self, x: Tensor) -> Tensor:
        batch, heads, tokens, size = x.shape
        x = x[:, :, None].expand(batch, heads, self.groups, tokens, size)
        return x.reshape(batch, heads * self.groups, tokens, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = self.repeated(self.rotated(key)), self.repeated(value)
        return self.o_proj(together(attend(self.rotated(query), key, value)))


class Transposed(nn.Module):
    """A linear layer whose weight lies the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Split(nn.Module):
    """GPT-2's: queries, keys and values in one, split at a stored size."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = 3, SIZE, 3 * SIZE
        self.c_attn, self.c_proj = Transposed(STREAM, 9 * SIZE), Transposed(3 * SIZE, STREAM)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], -1, self.head_dim
        parts = self.c_attn(x).split(self.split_size, dim=2)
        return self.c_proj(together(attend(*(part.view(shape).transpose(1, 2) for part in parts))))


class Biased(nn.Module):
    """T5's: a learned bias for each head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.inner_dim = 4, SIZE, 4 * SIZE
        self.q, self.k, self.v = (nn.Linear(STREAM, 4 * SIZE, bias=False) for _ in range(3))
        self.o = nn.Linear(4 * SIZE, STREAM, bias=False)
        self.distances = nn.Embedding(TOKENS, 4)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(TOKENS)
        bias = self.distances((at[:, None] - at[None]).abs()).permute(2, 0, 1)[None]
        shape = *x.shape[:2], self.n_heads, self.key_value_proj_dim
        parts = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = attend(*parts, bias)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.inner_dim))


class Interleaved(nn.Module):
    """Bloom's: each head's query, key and value side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.hidden_size = 4, SIZE, 4 * SIZE
        self.query_key_value = nn.Linear(STREAM, 12 * SIZE)
        self.dense = nn.Linear(4 * SIZE, STREAM)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x).view(*x.shape[:2], self.num_heads, 3, self.head_dim)
        query, key, value = (fused[..., part, :].transpose(1, 2) for part in range(3))
        y = attend(query, key, value).transpose(1, 2)
        return self.dense(y.reshape(*x.shape[:2], self.num_heads * self.head_dim))


class Fused(nn.Module):
    """timm's: three parts first, and the heads' size stored beside their number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = 4, SIZE, 4 * SIZE
        self.qkv, self.proj = nn.Linear(STREAM, 12 * SIZE), nn.Linear(4 * SIZE, STREAM)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], 3, self.num_heads, self.head_dim
        parts = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(attend(*parts).transpose(1, 2).reshape(*x.shape[:2], self.attn_dim))


class Block(nn.Module):
    """Attention and a gated network, each after an RMS norm, beside a residual stream."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.attention, self.between = RmsNorm(), attention(), RmsNorm()
        self.gate, self.up = nn.Linear(STREAM, 40), nn.Linear(STREAM, 40)
        self.down = nn.Linear(40, STREAM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(11, STREAM)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.norm, self.head = RmsNorm(), nn.Linear(STREAM, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + 0.1)
    return model.double().eval()


@torch.no_grad()
def oracle(model: nn.Module, places: Mapping[str, TensorSlice], ids: Tensor) -> Tensor:
    """What the full model gives with every entry outside the view at zero."""
    drop_entries(model, places)
    for layer in model.modules():
        if isinstance(layer, RmsNorm):
            layer.alive = (layer.weight != 0).double()
    return model(ids)  # type: ignore[no-any-return]


ATTENTIONS = {kind.__name__: kind for kind in (Grouped, Split, Biased, Interleaved, Fused)}
RULES = {
    "prefix": lambda: prefix,
    "rolling": lambda: rolling(3, "group"),
    "random": lambda: random(torch.Generator().manual_seed(3)),
}


def traced(kind: str) -> tuple[nn.Module, Channels]:
    model = randomised(Decoder(ATTENTIONS[kind]))
    return model, trace(model, torch.empty(2, TOKENS, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_stored_sizes_of_heads_follow(kind: str, rule: str) -> None:
    model, channels = traced(kind)
    assert channels.notes == ()
    assert channels.cut_share > 0.98
    ids = torch.randint(11, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    for ratio in (1 / 2, 1 / 4):
        kept = keep(channels, ratio, RULES[rule]())
        small = shrink(model, channels, kept)
        got = small(ids)
        expected = oracle(randomised(Decoder(ATTENTIONS[kind])), view(channels, kept), ids)
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
        assert verify(model, channels, kept) < 1e-9


def test_positions_that_rotate_entries_leave_heads_as_large_and_drop_whole_ones() -> None:
    model, channels = traced("Grouped")
    (group,) = (g for g in channels.groups if g.name == "blocks.0.attention.q_proj.weight:0")
    assert group.size == 4  # A head of keys, with the two heads of queries that share it.
    small = shrink(model, channels, keep(channels, 1 / 4)).get_submodule("blocks.0.attention")
    shapes = {name: tuple(t.shape) for name, t in small.named_parameters() if t.ndim == 2}
    assert shapes == {
        **{"q_proj.weight": (16, 6), "o_proj.weight": (6, 16)},
        **{"k_proj.weight": (8, 6), "v_proj.weight": (8, 6)},
    }
    assert vars(small)["head_dim"] == SIZE
    assert small.frequencies.shape == (4,)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Split", {"num_heads": 3, "head_dim": 2, "split_size": 6}),
        ("Biased", {"n_heads": 4, "key_value_proj_dim": 2, "inner_dim": 8}),
        ("Interleaved", {"num_heads": 4, "head_dim": 2, "hidden_size": 8}),
        ("Fused", {"num_heads": 4, "head_dim": 2, "attn_dim": 8}),
    ],
)
def test_other_heads_become_smaller(kind: str, sizes: dict[str, int]) -> None:
    model, channels = traced(kind)
    small = shrink(model, channels, keep(channels, 1 / 4)).get_submodule("blocks.1.attention")
    assert {name: vars(small)[name] for name in sizes} == sizes


def test_a_single_head_of_keys_is_never_dropped() -> None:
    class Multiquery(Grouped):
        def __init__(self) -> None:
            super().__init__()
            self.groups = 8
            self.k_proj, self.v_proj = nn.Linear(STREAM, SIZE), nn.Linear(STREAM, SIZE)

    model = randomised(Decoder(Multiquery))
    channels = trace(model, torch.empty(2, TOKENS, dtype=torch.int64, device="meta"))
    kept = keep(channels, 1 / 4)
    assert shrink(model, channels, kept).get_parameter(
        "blocks.0.attention.q_proj.weight"
    ).shape == (8 * SIZE, 6)
    assert verify(model, channels, kept) < 1e-9
