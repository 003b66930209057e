"""Whatever a model does, `trace`, `shrink` and `verify` end in a ModelError that helps."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from odd_layers import TOKENS, Does, Words
from sizewise.cutting.channels import trace
from sizewise.cutting.selection import keep
from sizewise.cutting.shrinking import resize, shrink
from sizewise.cutting.verification import verify
from sizewise.errors import ModelError
from sizewise.torch_tools.failures import Paths, blame, reason


def fails(error: Exception) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("mask"), "KeyError: 'mask'"),
        (AssertionError(), "AssertionError at 'raise error'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (RuntimeError("first line\nsecond line"), "first line"),
        (AttributeError("no such thing"), "AttributeError: no such thing"),
        (StopIteration(), "StopIteration at 'raise error'"),
    ],
)
def test_tracing_names_the_module_and_the_reason(error: Exception, text: str) -> None:
    model = Words(nn.Sequential(nn.Identity(), Does(fails(error))))
    with pytest.raises(ModelError) as caught:
        trace(model, TOKENS)
    assert f"Words cannot be traced on inputs of shape (2, 5, 6): {text} (in layer.1); " in str(
        caught.value
    )


def test_forwards_that_look_at_data_are_told_so() -> None:
    model = Words(Does(lambda x: x if x.max() > 0 else -x))
    with pytest.raises(ModelError, match=r"\(in layer\); it looks at numbers that it computed"):
        trace(model, TOKENS)


def test_tensors_from_elsewhere_are_told_so() -> None:
    outside = torch.ones(8)
    with pytest.raises(ModelError, match=r"\(in layer\); it uses a tensor that is not among its"):
        trace(Words(Does(lambda x: x * outside)), TOKENS)


def test_failures_that_are_caught_are_no_failures() -> None:
    def careful(x: Tensor) -> Tensor:
        try:
            return inner(x)
        except KeyError:
            return x

    inner = Does(fails(KeyError()))
    model = nn.Sequential(Words(Does(careful)), Does(fails(ValueError("later"))))
    model[0].layer.inner = inner
    with pytest.raises(ModelError, match=r"later \(in 1\)"):
        trace(model, TOKENS)


def test_paths_follow_the_innermost_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), Does(fails(KeyError("x")))))
    paths = Paths(model)
    with pytest.raises(KeyError) as caught:
        model(torch.zeros(1))
    assert paths.failed(caught.value) == "0.1"
    assert paths.failed(KeyError("another")) == ""
    assert paths.current == ""


def test_reasons_are_never_empty() -> None:
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("\n  two words\n")) == "two words"
    assert reason(ValueError("text\nand more")) == "ValueError: text"
    with pytest.raises(AssertionError) as caught:
        torch._assert(len("abc") == 4, "")
    assert reason(caught.value) == """AssertionError at 'torch._assert(len("abc") == 4, "")'"""


# ---- cutting


class Fixed(nn.Module):
    """A layer that insists on its size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], 2, 4).relu().flatten(-2)


def test_a_model_of_which_nothing_is_left_to_cut_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Fixed(), nn.Linear(8, 3))
    with pytest.raises(ModelError, match=r"cannot run when it is cut: .*\(in 1\); .*resize"):
        trace(model, TOKENS)


def test_a_cut_model_that_fails_by_itself_says_how() -> None:
    sizes = {8: "whole", 4: "half"}

    def look(x: Tensor) -> Tensor:
        assert sizes[x.shape[-1]]
        return x

    model = Words(Does(look))
    channels = trace(model, TOKENS)
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12
    with pytest.raises(ModelError, match=r"when it is cut: KeyError: 2 \(in layer\)"):
        shrink(model, channels, keep(channels, 1 / 4))


def test_a_resizer_that_fails_is_named() -> None:
    class Taught(nn.Linear):
        """A layer with a resizer of its own."""

    @resize.register
    def _(narrow: Taught, full: Taught) -> None:
        narrow.out_features = full.missing  # type: ignore[assignment]

    model = Words(Taught(8, 8))
    channels = trace(model, TOKENS)
    with pytest.raises(ModelError, match=r"layer cannot be told its new sizes \(AttributeError"):
        shrink(model, channels, keep(channels, 1 / 2))


# ---- copying


class Keeps(nn.Module):
    """A layer that keeps what it computed, with the graph that computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.seen = [self.last]
        return self.last.relu()


def used(model: nn.Module) -> nn.Module:
    model(torch.randn(2, 5, 6))
    return model


@pytest.mark.parametrize(
    "make",
    [
        Keeps,
        lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    ],
    ids=["graph", "old weight norm", "old spectral norm", "weight norm", "spectral norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_that_deepcopy_refuses_are_cut(make: Callable[[], nn.Module]) -> None:
    model = used(Words(make()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    channels = trace(model, TOKENS)
    kept = keep(channels, 1 / 2)
    assert verify(model, channels, kept) < 1e-12
    small = shrink(model, channels, kept)
    assert small(torch.randn(2, 5, 6)).shape == (2, 5, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_depthwise_convolutions_with_weight_norm_know_their_groups() -> None:
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Conv1d(5, 8, 1)),
        nn.utils.weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=8)),
        nn.Conv1d(8, 3, 1),
    )
    channels = trace(used(model), TOKENS)
    kept = keep(channels, 1 / 2)
    assert verify(model, channels, kept) < 1e-12
    middle = shrink(model, channels, kept)[1]
    assert (middle.groups, middle.in_channels, middle.out_channels) == (4, 4, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_name() -> None:
    model = Words(nn.Sequential(nn.Identity(), torch.jit.script(nn.ReLU())))
    with pytest.raises(ModelError, match=r"layer\.1 is compiled by torch\.jit.*Python module"):
        trace(model, TOKENS)


def test_what_cannot_be_copied_is_named() -> None:
    model = Words(nn.Sequential(nn.Identity(), nn.Linear(8, 8)))
    model.layer[1].lock = threading.Lock()
    with pytest.raises(ModelError, match=r"copied: layer 'layer\.1', a Linear: .*lock"):
        trace(model, TOKENS)


def test_lazy_layers_are_named() -> None:
    with pytest.raises(ModelError, match=r"layer\.1 has parameters without a shape yet; run"):
        trace(Words(nn.Sequential(nn.Identity(), nn.LazyLinear(8))), TOKENS)


# ---- who is to blame, without hooks


class Inner(nn.Module):
    def forward(this, x: object) -> object:  # noqa: N805
        raise KeyError(x)


def caught(module: nn.Module, x: object) -> Exception:
    with pytest.raises(KeyError) as info:
        module(x)
    return info.value


def test_the_innermost_layer_is_named() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Inner()))
    assert blame(caught(model, "a"), model) == "layer '1.0', a Inner: KeyError: 'a'"
    # Somebody else's layers have no name here, nor has the whole model.
    assert blame(caught(model, "a"), nn.Linear(1, 1)) == "KeyError: 'a'"
    assert blame(caught(model[1][0], "a"), model[1][0]) == "KeyError: 'a'"
    assert blame(caught(model, "a"), nn.Linear(1, 1), model).startswith("layer '1.0'")
