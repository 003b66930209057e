"""Cutting: narrow models compute what the masked full model does, and merge back exactly."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odd_models import Encoder, Grouped, MobileNet, Odd, UNet, bert
from sizewise.cutting.channels import Channels, trace
from sizewise.cutting.selection import Rule, keep, keep_like, prefix, random, rolling
from sizewise.cutting.shrinking import resize, shrink, view
from sizewise.cutting.verification import masked, verify
from sizewise.errors import ModelError
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import TensorSlice, cut, grid
from sizewise.memory.meter import Meter
from sizewise.memory.prediction import predict
from sizewise.models import build
from sizewise.steps.step import training_step

SHAPE = (3, 8, 8)
IDS = (2, 7)


def zoo(name: str, width: float = 1.0, **args: object) -> nn.Module:
    return build(name, classes=5, image=SHAPE, width=width, args=args)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "preresnet20": lambda: zoo("preresnet20"),
    "resnet20": lambda: zoo("resnet20"),
    "resnet18": lambda: zoo("resnet18", 0.125),
    "densenet40": lambda: zoo("densenet40"),
    "cnn": lambda: zoo("cnn"),
    "mlp": lambda: zoo("mlp"),
    "vit": lambda: zoo("vit", depth=2),
    "mobilenet": MobileNet,
    "unet": UNet,
    "bert": bert,
    "grouped": Grouped,
    "odd": Odd,
}
OF_WORDS = ("bert", "odd", "encoder")
RULES: dict[str, Callable[[], Rule]] = {
    "prefix": lambda: prefix,
    "rolling": lambda: rolling(13),
    "random": lambda: random(torch.Generator().manual_seed(1)),
}


@cache
def traced(name: str) -> tuple[nn.Module, Channels]:
    torch.manual_seed(0)
    model = {**MODELS, "encoder": Encoder}[name]()
    return model, trace(model, batch(name))


def batch(name: str) -> Tensor:
    return torch.zeros(IDS, dtype=torch.long) if name in OF_WORDS else torch.zeros(2, *SHAPE)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---- narrow models


@pytest.mark.parametrize("ratio", [1 / 2, 1 / 4, 1 / 6])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_cut_equals_masked(name: str, rule: str, ratio: float) -> None:
    model, channels = traced(name)
    assert verify(model, channels, keep(channels, ratio, RULES[rule]())) < 1e-12


def test_cut_equals_masked_where_windows_have_their_own_strides() -> None:
    model, channels = traced("densenet40")
    assert verify(model, channels, keep(channels, 1 / 4, rolling(7, "group"))) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ratio", [1 / 2, 1 / 4])
def test_cut_equals_masked_in_torchs_transformer(rule: str, ratio: float) -> None:
    model, channels = traced("encoder")
    kept = keep(channels, ratio, RULES[rule]())
    assert verify(model, channels, kept) < 1e-12
    small = shrink(model, channels, kept)
    assert small.head.weight is small.embed.weight


class Scaled(nn.Module):
    """Attention by hand, with logits divided by a size that is stored as Hugging Face's is."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 6
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 12) for _ in range(3))
        self.o_proj = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rule", RULES)
def test_cut_equals_masked_where_logits_are_scaled_by_the_thin_head(rule: str) -> None:
    model = Scaled()
    channels = trace(model, torch.empty(2, 5, 8))
    kept = keep(channels, 1 / 2, RULES[rule]())
    assert verify(model, channels, kept) < 1e-12
    assert shrink(model, channels, kept).head_dim == 3


def test_torchs_attention_refuses_heads_that_do_not_add_up() -> None:
    model, channels = traced("encoder")
    with pytest.raises(ModelError, match="choose a ratio at which both are equal"):
        shrink(model, channels, keep(channels, 1 / 6))


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"odd"}))
def test_nothing_is_left_whole(name: str) -> None:
    assert traced(name)[1].notes == ()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_fall_with_the_ratio(name: str) -> None:
    model, channels = traced(name)
    pieces = [shrink(model, channels, keep(channels, r), check=False) for r in (1, 1 / 2, 1 / 4)]
    counts = [parameters(piece) for piece in pieces]
    assert counts[0] == parameters(model)
    assert counts[1] < 0.5 * counts[0]
    assert counts[2] < 0.6 * counts[1]


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    out = model(inputs)
    return F.cross_entropy(getattr(out, "logits", out), targets)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_training_step_fall_with_the_ratio(name: str) -> None:
    model, channels = traced(name)
    inputs, step = batch(name), partial(training_step, loss=loss)
    # One label for each image or text, or for each pixel.
    targets = torch.zeros(2, *(SHAPE[1:] if name == "unet" else ()), dtype=torch.long)
    peaks = []
    for ratio in (1, 1 / 2, 1 / 4):
        small = shrink(model, channels, keep(channels, ratio), check=False).train()
        optimizer = torch.optim.SGD(small.parameters())
        with Meter() as meter:
            meter.track(small, inputs, targets)
            step(small, optimizer, inputs, targets)
        peaks.append(meter.peak)
    assert all(narrower < wider for wider, narrower in pairwise(peaks)), peaks
    assert predict(small, inputs, targets, step=step).peak == peaks[-1]


@pytest.mark.parametrize("name", MODELS)
def test_whole_width_is_the_model_itself(name: str) -> None:
    model, channels = traced(name)
    kept = keep(channels, 1)
    assert view(channels, kept) == {local: TensorSlice(local) for local in model.state_dict()}
    small = shrink(model, channels, kept)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in small.state_dict().items())
    assert repr(small) == repr(model)


@pytest.mark.parametrize("name", ["preresnet20", "densenet40", "cnn", "mlp"])
def test_shrunk_is_what_the_factory_builds(name: str) -> None:
    model, channels = traced(name)
    built = zoo(name, 0.5)
    small = shrink(model, channels, keep_like(channels, built))
    assert repr(small) == repr(built)
    built.load_state_dict(small.state_dict())
    images = torch.randn(4, *SHAPE)
    assert torch.equal(built(images), small(images))


def test_training_a_cut_model_is_training_the_masked_one() -> None:
    model, channels = traced("preresnet20")
    model = model.double().train()
    kept = keep(channels, 1 / 4, random(torch.Generator().manual_seed(2)))
    small, reference = shrink(model, channels, kept), masked(model, channels, kept)
    images, labels = torch.randn(6, *SHAPE, dtype=torch.float64), torch.arange(6) % 5
    for net in (small, reference):
        F.cross_entropy(net(images), labels).backward()
    slots = view(channels, kept)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for name, parameter in small.named_parameters():
        torch.testing.assert_close(parameter.grad, slots[name].read(gradients))
    for name, statistics in small.named_buffers():
        torch.testing.assert_close(statistics, slots[name].read(dict(reference.named_buffers())))


def test_shrinking_leaves_the_model_alone() -> None:
    model = zoo("cnn")
    channels = trace(model, torch.empty(2, *SHAPE))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = shrink(model, channels, keep(channels, 0.5))
    with torch.no_grad():
        for tensor in (*small.parameters(), *small.buffers()):
            tensor.zero_()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.requires_grad for p in small.parameters())


# ---- views


def test_neighbours_are_slices_and_others_are_lists() -> None:
    channels = trace(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), torch.empty(2, 6))

    def index(kept: list[int]) -> object:
        return view(channels, {"0.weight:0": torch.tensor(kept)})["0.weight"].index

    assert index([0, 1]) == (slice(0, 2), slice(None))
    assert index([1, 2]) == (slice(1, 3), slice(None))
    assert index([0, 1, 2, 3]) is None
    rows, columns = index([0, 3])  # type: ignore[misc]
    assert rows.tolist() == [0, 3]
    assert columns == slice(None)
    assert view(channels, {"0.weight:0": torch.tensor([2])})["1.bias"] == TensorSlice("1.bias")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_cut_then_merge_is_exact_where_covered(name: str, rule: str) -> None:
    model, channels = traced(name)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    slots = view(channels, keep(channels, 1 / 3, RULES[rule]()))
    piece = cut(state, slots)
    mean = CoverageMean(state)
    mean.add(piece, slots, weight=1.0)
    merged = mean.result()
    assert all(torch.equal(merged[n], state[n]) for n in state)

    changed = {n: t + 1 for n, t in piece.items()}
    mean = CoverageMean(state)
    mean.add(changed, slots, weight=1.0)
    merged = mean.result()
    for local, slot in slots.items():
        assert torch.equal(slot.read(merged), changed[local])
        untouched = merged[local] == state[local]
        assert int((~untouched).sum()) == changed[local].numel()


def test_nested_widths_share_the_corner_and_keep_the_ring() -> None:
    model, channels = traced("preresnet20")
    state = model.state_dict()
    small, large = (view(channels, keep(channels, ratio)) for ratio in (1 / 4, 1 / 2))
    mean = CoverageMean(state)
    mean.add({n: torch.full_like(t, 1) for n, t in cut(state, small).items()}, small, weight=3.0)
    mean.add({n: torch.full_like(t, 5) for n, t in cut(state, large).items()}, large, weight=1.0)
    weight = mean.result()["blocks.0.conv1.weight"]
    assert (weight[:4, :4] == 2).all()
    assert (weight[4:8, :8] == 5).all()
    assert (weight[:4, 4:8] == 5).all()
    assert torch.equal(weight[8:], state["blocks.0.conv1.weight"][8:])


@pytest.mark.parametrize(("stride", "never"), [("common", 0.498), ("group", 0.0)])
def test_weights_that_no_window_ever_holds(
    stride: Literal["common", "group"], never: float
) -> None:
    model, channels = traced("preresnet20")
    unseen = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.ndim == 4}
    for round_index in range(64):  # After 64 rounds, the common windows are where they began.
        slots = view(channels, keep(channels, 1 / 4, rolling(round_index, stride)))
        for name, tensor in unseen.items():
            index = slots[name].index
            assert index is not None
            tensor[grid(index, tensor.shape)] = 0
    share = sum(t.sum().item() for t in unseen.values()) / sum(t.numel() for t in unseen.values())
    assert round(share, 3) == never


# ---- never wrong in silence


class Stored(nn.Module):
    """Attention that stores the size of a head, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 6
        self.heads = nn.Linear(8, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.heads(x).view(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)
        y = (y @ y.transpose(-2, -1)).softmax(-1) @ y
        return self.out(y.transpose(1, 2).flatten(2))


def test_stored_sizes_are_found_and_can_be_taught() -> None:
    # Half of two heads of six is one head of six to its forward, which would run without a word.
    with pytest.raises(ModelError, match="goes another way when it is cut: expected matmul"):
        trace(Stored(), torch.empty(2, 5, 8))

    class Taught(Stored):
        pass

    @resize.register
    def _(narrow: Taught, full: Taught) -> None:
        narrow.size = len(narrow.heads.weight) * full.size // len(full.heads.weight)

    taught = Taught()
    channels = trace(taught, torch.empty(2, 5, 8))
    assert [(group.name, group.size) for group in channels.groups] == [("heads.weight:0", 6)]
    assert verify(taught, channels, keep(channels, 1 / 2)) < 1e-12


def test_a_model_of_which_nothing_is_left_to_cut_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).reshape(-1, 3, 4).relu().reshape(-1, 12))

    with pytest.raises(ModelError, match="cannot run when it is cut"):
        trace(Fixed(), torch.empty(2, 8))


def test_verify_finds_a_wrong_index() -> None:
    model, channels = traced("cnn")
    tensors = dict(channels.tensors)
    outputs, *rest = tensors["blocks.0.conv.weight"]
    tensors["blocks.0.conv.weight"] = (outputs[::-1], *rest)
    with pytest.raises(ModelError, match="differs from its masked self"):
        verify(model, replace(channels, tensors=tensors), keep(channels, 1 / 2))


def test_narrow_strided_convolutions_are_contiguous_and_right() -> None:
    # PyTorch 2.13 corrupts memory on CPU in the backward pass of a strided 1x1 convolution whose
    # input is channels-last with fewer than 8 channels.
    model = zoo("preresnet20").to(memory_format=torch.channels_last)
    channels = trace(model, torch.empty(2, *SHAPE))
    small = shrink(model, channels, keep(channels, 1 / 4))
    assert all(p.is_contiguous() for p in small.parameters())
    assert small.get_parameter("blocks.3.projection.weight").shape == (8, 4, 1, 1)
    images, labels = torch.randn(4, *SHAPE), torch.arange(4)
    gradients: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.float64, torch.float32):
        net = copy.deepcopy(small).to(dtype)
        F.cross_entropy(net(images.to(dtype)), labels).backward()
        gradients[dtype] = net.get_parameter("blocks.3.projection.weight").grad
    torch.testing.assert_close(
        gradients[torch.float32].double(), gradients[torch.float64], rtol=1e-3, atol=1e-5
    )
