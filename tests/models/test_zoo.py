import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from sizewise.errors import ConfigError, ModelError
from sizewise.models import build, catalogue

# One model of each kind: the others differ in depth only.
FAMILIES = ["preresnet20", "resnet20", "resnet18", "densenet40", "vit", "cnn", "mlp", "linear"]
IMAGE_MODELS = [name for name in catalogue() if name != "encoder"]


# Thin versions of two that take seconds to build at full width.
WIDTHS = {"wide_resnet101_2": 0.125, "vit_base": 0.125}


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_model_trains_on_digits(name: str) -> None:
    model = build(name, classes=7, image=(1, 8, 8), width=WIDTHS.get(name, 1.0))
    logits = model(torch.randn(2, 1, 8, 8))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_model_fits_cifar(name: str) -> None:
    model = build(name, classes=7, image=(3, 32, 32), width=WIDTHS.get(name, 1.0))
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("image", [(1, 28, 28), (3, 64, 64), (3, 32, 64)])
def test_every_kind_of_model_fits_other_images(name: str, image: tuple[int, int, int]) -> None:
    build(name, classes=10, image=image)  # which checks the output


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "linear"])
def test_width_narrows_every_model(name: str) -> None:
    full = build(name, classes=10, image=(3, 32, 32))
    half = build(name, classes=10, image=(3, 32, 32), width=0.5)
    sizes = {key: tensor.numel() for key, tensor in full.named_parameters()}
    assert sizes.keys() == dict(half.named_parameters()).keys()
    for key, tensor in half.named_parameters():
        fixed = key in {"head.bias", "head.linear.bias"}
        assert tensor.numel() == sizes[key] if fixed else tensor.numel() <= sizes[key] * 0.51, key


@pytest.mark.parametrize("name", ["preresnet20", "resnet20", "resnet18", "densenet40", "cnn"])
def test_rounding_is_an_option(name: str) -> None:
    floor, ceil = (
        build(name, classes=10, image=(1, 8, 8), width=0.165, args={"rounding": rounding})
        for rounding in ("floor", "ceil")
    )
    assert sum(map(torch.numel, floor.parameters())) < sum(map(torch.numel, ceil.parameters()))


def test_weights_come_from_the_global_generator_and_the_check_leaves_no_trace() -> None:
    options = {"classes": 10, "image": (1, 8, 8), "args": {"dropout": 0.5}}
    torch.manual_seed(0)
    first = build("vit", **options)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    second = build("vit", **options)
    assert torch.equal(torch.get_rng_state(), after)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_check_leaves_norm_statistics_and_mode_alone() -> None:
    model = build("preresnet20", classes=10, image=(1, 8, 8))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(module.training for module in model.modules())
    assert all(norm.num_batches_tracked == 0 and norm.running_var.eq(1).all() for norm in norms)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, sizewise.models as m; m.catalogue(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="'prresnet20'; did you mean 'preresnet20'"):
        build("prresnet20", classes=10, image=(1, 8, 8))
    with pytest.raises(ConfigError, match="choose one of cnn, densenet40, "):
        build("???", classes=10, image=(1, 8, 8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("preresnet18", r"6n \+ 2, and 18 came; use preresnet14 or preresnet20"),
        ("resnet2", r"6n \+ 2, and 2 came; use resnet8 or resnet14"),
        ("densenet41", r"6n \+ 4, and 41 came; use densenet40 or densenet46"),
        ("resnet50", "bottleneck"),
    ],
)
def test_impossible_depths(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, classes=10, image=(1, 8, 8))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet18", {"max_pool": True}, "no option 'max_pool'; it takes rounding, maxpool"),
        ("linear", {"rounding": "ceil"}, "no option 'rounding'; it takes none"),
        ("resnet18", {"maxpool": "no"}, "'maxpool' of the model 'resnet18' is of type bool; 'no'"),
        ("vit", {"dropout": True}, "of type float; True came"),
        ("vit", {"dropout": 2}, "cannot be built with dropout = 2"),
        ("vit", {"dim": 30}, "a dim that heads divides"),
        ("vit", {"patch": 3}, "patches of 3x3 do not tile images of 8x8"),
        ("cnn", {"layers": [8] * 5}, "5 layers do not suit images of 8x8"),
        ("mlp", {"hidden": []}, "use linear instead"),
        ("mlp", {"hidden": 200}, "cannot be built with hidden = 200"),
        ("cnn", {"rounding": "up"}, "one of floor, floor_min1, ceil"),
        ("cnn", {"classes": 3}, "'classes' is no option"),
        ("densenet40", {"growth": 0}, "at least one channel"),
    ],
)
def test_bad_options(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, classes=10, image=(1, 8, 8), args=args)


def test_images_too_small_for_a_densenet() -> None:
    with pytest.raises(ModelError, match="needs at least 4x4, but 3x8 came"):
        build("densenet40", classes=10, image=(1, 3, 8))


def test_width_must_leave_channels_and_be_known() -> None:
    with pytest.raises(ModelError, match="leaves none of 16 channels"):
        build("preresnet20", classes=10, image=(1, 8, 8), width=0.05)
    with pytest.raises(ModelError, match=r"'linear' cannot be built at width 0\.5"):
        build("linear", classes=10, image=(1, 8, 8), width=0.5)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module in the current folder, which is not on the import path."""
    source = """
        from torch import nn

        class Net(nn.Sequential):
            def __init__(self, channels, classes=10, hidden=4):
                super().__init__(
                    nn.Flatten(), nn.Linear(channels * 64, hidden), nn.Linear(hidden, classes)
                )

        def wide(classes, width, **options):
            return Net(1, classes, hidden=int(100 * width), **options)

        def wrong(classes):
            return Net(1, 100)

        def flat():
            return nn.Flatten(0)

        def tuples():
            return nn.LSTM(8, 10)

        def number(classes):
            return 3

        constant = 3
    """
    (tmp_path / "factories_of_a_user.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories_of_a_user", raising=False)


def own(factory: str, **options: object) -> nn.Module:
    image = options.pop("image", (1, 8, 8))
    return build(f"factories_of_a_user:{factory}", classes=10, image=image, **options)


@pytest.mark.usefixtures("factories")
def test_a_users_factory_gets_what_it_asks_for() -> None:
    assert own("Net", image=(3, 8, 8), args={"hidden": 5})[1].weight.shape == (5, 192)
    assert own("wide", width=0.25)[1].weight.shape == (25, 64)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("Net", {"width": 0.5}, "its factory takes no 'width'"),
        ("wide", {"args": {"depth": 3}}, "cannot be built with depth = 3"),
        ("Net", {"args": {"depth": 3}}, "no option 'depth'; it takes hidden"),
        ("Net", {"image": (1, 9, 9)}, r"cannot run on images of shape \(1, 9, 9\)"),
        ("wrong", {}, "gives 100 outputs for 10 classes"),
        ("flat", {}, r"gives shape \(128,\) for a batch of 2 samples; expected \(2, 10\)"),
        ("tuples", {"image": (5, 8)}, "gives a tuple, not a tensor of logits"),
        ("number", {}, "gives a int; a factory returns a torch.nn.Module"),
    ],
)
def test_a_users_factory_that_does_not_fit(
    factory: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        own(factory, **options)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", "cannot import 'no_such_module'"),
        ("factories_of_a_user:constant", "has no function or class 'constant'"),
        ("factories_of_a_user:missing", "has no function or class 'missing'"),
        (":make", "cannot import ''"),
    ],
)
def test_a_users_factory_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, classes=10, image=(1, 8, 8))
