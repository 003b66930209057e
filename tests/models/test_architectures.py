"""The networks are those of the papers: parameter counts, layer counts and shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sizewise.models import build
from sizewise.models.resnet import wide_resnet101_2
from sizewise.models.vit import vit_base

CIFAR = (3, 32, 32)


def fedin(repeats: tuple[int, int, int], base: int = 16) -> int:
    """Count the parameters of a model of FedIN's Table I layer by layer."""
    count = 3 * 9 * base + base + 2 * base  # The extractor: convolution with bias, norm.
    inputs = base
    for stage, number in enumerate(repeats):
        inner, outputs = base * 2**stage, 4 * base * 2**stage
        unit = inner + 2 * inner + 9 * inner * outputs + outputs + 2 * outputs
        count += inputs * inner + unit + inputs * outputs + outputs + 2 * outputs
        count += number * (outputs * inner + unit)
        inputs = outputs
    return count + inputs * 10 + 10


FEDIN = {repeats: fedin(repeats) for repeats in [(2, 3, 5), (1, 1, 1)]}


def make(
    name: str, image: tuple[int, int, int] = CIFAR, classes: int = 10, **options: object
) -> nn.Module:
    return build(name, classes=classes, image=image, **options)


def parameters(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.parameters())


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """Convolutions in execution order, projections left out, as SLT counts them."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and "projection" not in name
    ]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("preresnet20", {}, 272_282),
        ("resnet20", {}, 294_874),
        ("resnet56", {"args": {"projection": 1, "global_pool": True}}, 855_770),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"args": {"maxpool": False}}, 11_173_962),
        ("resnet34", {}, 21_282_122),
        ("densenet40", {}, 176_122),
        ("vit_tiny", {"image": (3, 224, 224), "classes": 1000}, 5_717_416),
        ("fedin_b", {"args": {"base": 16}}, FEDIN[1, 1, 1]),
        ("fedin_a", {"args": {"base": 16}}, FEDIN[2, 3, 5]),
        ("fedin_d", {"args": {"base": 16, "share_repeats": True}}, FEDIN[1, 1, 1]),
        ("linear", {"image": (1, 28, 28)}, 7_850),
        ("mlp", {"image": (1, 28, 28)}, 199_210),
    ],
)
def test_parameter_counts(name: str, options: dict[str, object], expected: int) -> None:
    assert parameters(make(name, **options)) == expected


@pytest.mark.parametrize(
    ("factory", "expected"), [(wide_resnet101_2, 126_886_696), (vit_base, 86_567_656)]
)
def test_parameter_counts_of_large_models(factory: Callable[..., nn.Module], expected: int) -> None:
    with torch.device("meta"):
        assert parameters(factory(classes=1000, image=(3, 224, 224))) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("preresnet20", 19), ("resnet20", 19), ("resnet44", 43), ("resnet56", 55), ("densenet40", 39)],
)
def test_convolution_counts(name: str, expected: int) -> None:
    assert len(convolutions(make(name, image=(1, 8, 8)))) == expected


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("preresnet20", 9), ("resnet110", 54), ("resnet34", 16), ("densenet40", 20), ("vit_tiny", 12)],
)
def test_block_counts(name: str, blocks: int) -> None:
    assert len(make(name, image=(1, 8, 8)).blocks) == blocks


@pytest.mark.parametrize("name", ["preresnet20", "resnet20", "densenet40"])
def test_modules_are_registered_in_execution_order(name: str) -> None:
    model = make(name, image=(1, 8, 8))
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    ran: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: ran.append(module))
    model(torch.zeros(1, 1, 8, 8))
    assert ran == layers


@pytest.mark.parametrize(
    ("ratio", "rounding", "stages"),
    [(1 / 6, "ceil", (3, 6, 11)), (0.165, "floor", (2, 5, 10)), (1 / 8, "floor", (2, 4, 8))],
)
def test_preresnet_widths(ratio: float, rounding: str, stages: tuple[int, ...]) -> None:
    model = make("preresnet20", width=ratio, args={"rounding": rounding})
    counts = [conv.out_channels for conv in convolutions(model)]
    assert counts == [stages[0]] * 7 + [stages[1]] * 6 + [stages[2]] * 6
    assert model.stem.conv.in_channels == 3
    assert model.head.linear.weight.shape == (10, stages[2])


def test_preresnet_shortcuts() -> None:
    model = make("preresnet20")
    block, entry = model.blocks[0], model.blocks[3]
    assert block.projection is None
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), x)  # the identity itself, not its activation
    assert isinstance(entry.projection, nn.Conv2d)
    assert entry.projection.kernel_size == (1, 1)
    nn.init.zeros_(entry.conv2.weight)
    assert torch.equal(entry(x), entry.projection(torch.relu(entry.norm1(x))))


@pytest.mark.parametrize(("side", "features"), [(8, 64), (28, 64), (32, 256), (64, 1024)])
def test_slt_pool_keeps_a_quarter_of_the_last_feature_map(side: int, features: int) -> None:
    assert make("resnet20", image=(3, side, side)).head.linear.in_features == features


def test_slt_pool_is_a_4x4_average() -> None:
    x = torch.randn(2, 64, 8, 8)
    pool = make("resnet20").head.pool
    torch.testing.assert_close(pool(x), nn.functional.avg_pool2d(x, 4))


def test_slt_projection_is_a_strided_3x3_convolution_with_norm() -> None:
    projection = make("resnet20").blocks[3].projection
    assert projection.conv.kernel_size == (3, 3)
    assert projection.conv.stride == (2, 2)
    assert isinstance(projection.norm, nn.BatchNorm2d)


def test_maxpool_is_optional_in_resnet18() -> None:
    x = torch.zeros(1, 3, 32, 32)
    assert make("resnet18").stem(x).shape == (1, 64, 16, 16)
    assert make("resnet18", args={"maxpool": False}).stem(x).shape == (1, 64, 32, 32)


def test_densenet_puts_new_channels_in_front() -> None:
    layer = make("densenet40").blocks[0]
    x = torch.randn(2, 24, 4, 4)
    out = layer(x)
    assert out.shape == (2, 36, 4, 4)
    assert torch.equal(out[:, 12:], x)


def test_densenet_grows_by_differences_of_totals() -> None:
    model = make("densenet40", width=0.33)
    inputs = [block.conv1.in_channels for block in model.blocks[:6]]
    assert inputs == [int(total * 0.33) for total in range(24, 96, 12)]
    assert {block.conv2.out_channels for block in model.blocks[:6]} == {4}  # int(12 * .33) is 3
    assert model.blocks[6].conv.weight.shape == (int(48 * 0.33), int(96 * 0.33), 1, 1)


def test_vit_width_keeps_the_heads() -> None:
    model = make("vit_tiny", width=1 / 6)
    attention = model.blocks[0].attention
    assert attention.heads == 3
    assert attention.query.weight.shape == (33, 33)
    assert model.blocks[0].mlp.linear1.weight.shape == (132, 33)


@pytest.mark.parametrize(("side", "tokens"), [(8, 5), (64, 257), (224, 197)])
def test_vit_tiny_chooses_its_patch(side: int, tokens: int) -> None:
    assert make("vit_tiny", image=(3, side, side)).stem.position.shape == (1, tokens, 192)


def test_attention_equals_its_definition() -> None:
    torch.manual_seed(0)
    attention = make("vit", image=(1, 8, 8)).blocks[0].attention
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 64)
    mixed = []
    for head in range(4):
        rows = slice(16 * head, 16 * head + 16)
        query, key, value = (
            x @ layer.weight[rows].T + layer.bias[rows]
            for layer in (attention.query, attention.key, attention.value)
        )
        mixed.append(torch.softmax(query @ key.transpose(1, 2) / 4, dim=-1) @ value)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(mixed, dim=-1)))


def test_cnn_of_heterofl() -> None:
    model = make("cnn", image=(1, 28, 28), args={"layers": [64, 128, 256, 512]})
    x = model.stem(torch.zeros(1, 1, 28, 28))
    for block in model.blocks:
        x = block(x)
    assert x.shape == (1, 512, 3, 3)


def test_the_models_of_fedin_share_their_ends_and_differ_in_depth() -> None:
    models = {letter: make(f"fedin_{letter}", args={"base": 4}) for letter in "abcde"}
    # The first units, the repeats of its Table I, and the pool.
    depths = {letter: len(model.blocks) for letter, model in models.items()}  # type: ignore[arg-type]
    assert depths == {
        "a": 3 + 10 + 1,
        "b": 3 + 3 + 1,
        "c": 3 + 6 + 1,
        "d": 3 + 7 + 1,
        "e": 3 + 4 + 1,
    }
    ends = [
        {n: t.shape for n, t in model.state_dict().items() if not n.startswith("blocks")}
        for model in models.values()
    ]
    assert all(shapes == ends[0] for shapes in ends)
    assert ends[0]["head.weight"] == (10, 16 * 4)
    features = models["a"].stem(torch.zeros(2, *CIFAR))  # type: ignore[operator]
    assert features.shape == (2, 4, 16, 16)


def test_shared_repeats_are_one_unit() -> None:
    model = make("fedin_c", args={"base": 4, "share_repeats": True})
    blocks = list(model.blocks)  # type: ignore[arg-type]
    assert len(blocks) == 10
    assert blocks[1] is blocks[2]
    assert blocks[1] is not blocks[0]
