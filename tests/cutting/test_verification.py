"""Verifying: cut models against masked ones in both modes, loosely cut ones, and what is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odd_layers import CUT, IMAGES, TOKENS, WHOLE, Does, Pictures, Words, example
from odd_models import Encoder
from sizewise.cutting.channels import Channels, Kept, trace
from sizewise.cutting.selection import keep, random, rolling
from sizewise.cutting.shrinking import shrink
from sizewise.cutting.verification import masked, verify
from sizewise.errors import ModelError
from sizewise.models import build

# ---- odd layers


def difference(model: nn.Module, channels: Channels, kept: Kept, training: bool) -> float:
    """Compare a cut model with a masked one by running both, and nothing else."""
    model = model.double().train(training)
    x = torch.randn(channels.inputs[0].shape, dtype=torch.float64)
    with torch.no_grad():
        got, expected = shrink(model, channels, kept)(x), masked(model, channels, kept)(x)
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [*WHOLE, *CUT])
@pytest.mark.parametrize("training", [False, True])
def test_cut_equals_masked_in_both_modes(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = {**{name: make for name, (make, _) in WHOLE.items()}, **CUT}[name]()
    channels = trace(model, example(model))
    for ratio in (1 / 2, 1 / 4):
        kept = keep(channels, ratio, random(torch.Generator().manual_seed(1)))
        assert difference(model, channels, kept, training) < 1e-12
        assert verify(model, channels, kept) < 1e-12


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_left_whole_is_said_once(name: str) -> None:
    make, note = WHOLE[name]
    model = make()
    channels = trace(model, example(model))
    found, *others = channels.notes
    assert found.startswith(note)
    # The scale and shift of AdaGN are channels of their own.
    assert len(others) == (name == "AdaGN")
    assert channels.groups, "the rest of the model is still cut"


@pytest.mark.parametrize("name", CUT)
def test_what_can_be_cut_is_cut(name: str) -> None:
    model = CUT[name]()
    channels = trace(model, example(model))
    assert channels.notes == ()
    assert channels.cut_share > 0.95


def test_group_norms_lose_whole_groups() -> None:
    model = CUT["group norm without weights"]()
    channels = trace(model, IMAGES)
    norm = shrink(model, channels, keep(channels, 1 / 2)).get_submodule("layer")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (2, 4)


# ---- training


class Auxiliary(nn.Module):
    """A head that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)
        self.early, self.head = nn.Linear(8, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        logits = self.head(self.body(x).relu().mean((2, 3)))
        return (logits, self.early(x.mean((2, 3)))) if self.training else logits


def test_heads_that_run_in_training_only_are_cut_with_the_rest() -> None:
    model = Auxiliary()
    channels = trace(model, IMAGES)
    assert channels.notes == ()
    kept = keep(channels, 1 / 2, rolling(3))
    assert verify(model, channels, kept) < 1e-12
    logits, early = shrink(model.train(), channels, kept)(torch.randn(2, 3, 8, 8))
    assert logits.shape == early.shape == (2, 3)


def test_features_that_are_returned_in_training_stay_whole_and_are_named() -> None:
    class Features(Auxiliary):
        """Returns what it computed on the way as well, in training."""

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            x = self.stem(x).relu()
            logits = self.head(self.body(x).relu().mean((2, 3)))
            return (logits, x) if self.training else logits

    channels = trace(Features(), IMAGES)
    assert channels.notes[0] == "what the forward returns in training stays whole"
    assert [group.name for group in channels.groups] == ["body.weight:0"]


def test_statistics_of_the_given_model_are_untouched() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    channels = trace(model, torch.empty(2, 6))
    verify(model, channels, keep(channels, 1 / 2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training


def test_random_numbers_do_not_matter_and_are_not_used_up() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3) + 0.1 * torch.randn_like(x) * torch.rand(1)

    model = nn.Sequential(Words(Does(noisy)), nn.Dropout(0.5))
    channels = trace(model, TOKENS)
    state = torch.get_rng_state()
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12
    assert torch.equal(torch.get_rng_state(), state)


class Chance(nn.Module):
    """A layer that is left out by chance, though what it reads and gives are different channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.training or torch.rand(1) < 0.5:
            x = self.middle(x)
        return self.last(x)


def test_both_ways_of_a_forward_that_decides_by_chance_are_compared() -> None:
    model = Chance()
    channels = trace(model, TOKENS)
    (note,) = channels.notes
    assert note.startswith(
        "Chance is traced in eval mode only; its training pass does not run without data"
    )
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12
    with pytest.raises(ModelError, match="in training mode, first in matmul in last"):
        verify(model, channels, keep(channels, 1 / 2, random(torch.Generator().manual_seed(1))))


def test_a_training_pass_that_cannot_run_at_all_is_not_blamed_on_the_cut() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    channels = trace(model, torch.empty(1, 6))
    with pytest.raises(ModelError, match=r"cannot run on inputs of shape \(1, 6\) in training"):
        verify(model, channels, keep(channels, 1 / 2))


def test_what_computes_in_float32_is_compared_in_float64() -> None:
    model = Words(Does(lambda x: x.float().softmax(1).to(x.dtype)))
    channels = trace(model, TOKENS)
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12


# ---- what is found


def test_error_says_where_and_what_to_do() -> None:
    class Numbered(nn.Module):
        """Something no rule can see: numbers, made anew, that go by the number of channels."""

        def forward(self, x: Tensor) -> Tensor:
            return x * (1.0 if x.shape[-1] >= 4 else x.clone().fill_(x.shape[-1]))

    model = Words(Numbered())
    channels = trace(model, TOKENS)
    with pytest.raises(ModelError, match=r"layer.*or choose a method that does not cut"):
        verify(model, channels, keep(channels, 1 / 4))


def test_first_difference_is_named() -> None:
    model = Words(nn.Linear(8, 8))
    channels = trace(model, TOKENS)
    tensors = dict(channels.tensors)
    outputs, inputs = tensors["layer.weight"]
    tensors["layer.weight"] = (outputs[::-1], inputs)
    with pytest.raises(ModelError, match="in eval mode, first in matmul in layer"):
        verify(model, replace(channels, tensors=tensors), keep(channels, 1 / 2))


def test_divisions_by_zero_are_named() -> None:
    model = Words(Does(lambda x: x / x.std(1, keepdim=True)))
    channels = trace(model, TOKENS)
    with pytest.raises(ModelError, match="divide by something that is zero for a masked channel"):
        verify(model, channels, keep(channels, 1 / 2))


# ---- loose cuts


def loosely(channels: Channels, full: int, width: float) -> Kept:
    return keep(channels, lambda g: 1.0 if g.index < full else width, rounding="floor_min1")


def zoo(name: str) -> tuple[nn.Module, Tensor]:
    if name == "encoder":
        return Encoder(), torch.empty(2, 7, dtype=torch.long)
    args = {"depth": 2} if name == "vit" else {}
    return build(name, classes=5, image=(3, 8, 8), args=args), IMAGES


@pytest.mark.parametrize("name", ["preresnet20", "resnet20", "densenet10", "vit", "cnn", "mlp"])
@pytest.mark.parametrize("share", [0, 1 / 2, 1])
def test_loosely_cut_models_are_verified(name: str, share: float) -> None:
    torch.manual_seed(0)
    model, inputs = zoo(name)
    channels = trace(model, inputs, loose=True)
    full = round(share * (len(channels.groups) - 1))
    for width in (1 / 2, 0.01):
        assert verify(model, channels, loosely(channels, full, width)) < 1e-12


def test_torchs_transformer_is_verified_where_its_heads_add_up() -> None:
    model, inputs = zoo("encoder")
    channels = trace(model, inputs, loose=True)
    assert verify(model, channels, loosely(channels, 0, 1 / 2)) < 1e-12


class Similar(nn.Module):
    """A stream whose tokens are compared as they are, without weights that could mask channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(x @ x.transpose(1, 2))


def test_what_a_shortcut_drops_is_masked_in_the_sum() -> None:
    model = Similar()
    channels = trace(model, TOKENS, loose=True)
    assert [group.size for group in channels.groups] == [8, 8]
    kept = loosely(channels, 1, 1 / 2)
    assert verify(model, channels, kept) < 1e-12
    blind = {
        mode: tuple(replace(step, drops=False) for step in steps)
        for mode, steps in channels.passes.items()
    }
    with pytest.raises(ModelError, match="first in matmul in the model"):
        verify(model, replace(channels, passes=blind), kept)


class Mapped(nn.Module):
    """A single map that is added to all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.map = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        return x + self.map(x)


class Heads(nn.Module):
    """Heads of four, as many as there are, beside a shortcut."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.project, self.out = nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).view(*x.shape[:2], -1, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("width", [1 / 2, 1 / 4, 0.01])
def test_a_map_that_is_added_to_all_channels_drops_none(width: float) -> None:
    model = Pictures(nn.Sequential(Mapped(), Mapped()))
    channels = trace(model, IMAGES, loose=True)
    assert channels.broadcasts == {"layer.0", "layer.1"}
    kept = loosely(channels, 1, width)
    assert verify(model, channels, kept) < 1e-12
    small = shrink(model, channels, kept)
    size = len(kept["layer.0.body.weight:0"])
    assert small.get_submodule("layer.0")(torch.zeros(1, 8, 4, 4)).shape[1] == size


@pytest.mark.parametrize("loose", [True, False])
def test_heads_of_stored_sizes_are_left_whole_by_name(loose: bool) -> None:
    model = Words(nn.Sequential(Heads(4), Heads(4)))
    channels = trace(model, TOKENS, loose=loose)
    (note,) = channels.notes
    assert note.startswith("layer.0 uses sizes that it stored; the channels inside it stay whole")
    assert not any("project" in group.name for group in channels.groups)
    kept = loosely(channels, 1, 2 / 3) if loose else keep(channels, 1 / 4)
    assert verify(model, channels, kept) < 1e-12


@pytest.mark.parametrize("check", [shrink, verify])
def test_stored_sizes_that_a_trial_did_not_meet_are_refused_by_name(
    check: Callable[..., object],
) -> None:
    def look(x: Tensor) -> Tensor:  # Half of the channels are as welcome as all of them.
        return x if x.shape[-1] in (4, 8) else x.sin()

    model = Words(Does(look))
    channels = trace(model, TOKENS)
    with pytest.raises(ModelError, match=r"got sin .*sizewise\.cutting\.resize"):
        check(model, channels, keep(channels, 1 / 4))


def test_a_stream_whose_first_width_is_noted_stays_together() -> None:
    class Noted(nn.Module):
        """Ends in the shape that it began with, as GPT-2 does."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            shape = x.shape
            for block in self.blocks:
                x = x + block(x).relu()
            return self.head(x.view(shape))

    channels = trace(Noted(), TOKENS, loose=True)
    assert [group.size for group in channels.groups] == [8]
    assert channels.notes == (
        "Noted keeps a residual stream at one width; it does not run where that changes on the way",
    )
    assert verify(Noted(), channels, keep(channels, 1 / 4)) < 1e-12


def test_streams_whose_channels_are_not_where_sums_drop_them_stay_together() -> None:
    class Signals(nn.Module):
        """A residual stream (B, C, T)."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Conv1d(5, 8, 1), nn.Conv1d(8, 8, 1)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head((x + self.block(x).relu()).mean(-1))

    channels = trace(Signals(), TOKENS, loose=True)
    assert len(channels.groups) == 1
    assert verify(Signals(), channels, keep(channels, 1 / 2)) < 1e-12
