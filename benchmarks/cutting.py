"""What cutting a model costs, and what a cut model saves, at ratios 1, 1/2 and 1/4.

    python benchmarks/cutting.py           # all models, about two minutes
    python benchmarks/cutting.py unet bert # some of them; --smoke: one, in seconds

One table is printed: parameters; bytes of a training step, as `sizewise.memory.predict` says;
milliseconds of a training step; and the milliseconds that tracing, a view and shrinking take. Times
are the best of several on one thread. The three ratios take turns, so that all of them meet the
same machine. The step is of SGD with momentum, on 32 images of CIFAR's shape, or 8 texts of 64
tokens for BERT, which is built from a config and needs the `dev` or the `text` extra.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import common
from sizewise import models
from sizewise.cutting.channels import trace
from sizewise.cutting.selection import keep, rolling
from sizewise.cutting.shrinking import shrink, view
from sizewise.memory.prediction import predict
from sizewise.steps.step import training_step

RATIOS = {"1": 1.0, "1/2": 1 / 2, "1/4": 1 / 4}
COLUMNS = (
    *("model", "ratio", "parameters", "bytes of a step", "step ms"),
    *("trace ms", "view ms", "shrink ms"),
)
IMAGES = (32, 3, 32, 32)
TEXTS = (8, 64)


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, filter each channel by itself, project."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 6 * inputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            *(nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, inputs, height, width) to (batch, outputs, ...)."""
        y: Tensor = self.body(x)
        return x + y if self.residual else y


def mobilenet() -> nn.Module:
    """Return a MobileNetV2 for small images."""
    stages = ((24, 1, 2), (32, 2, 3), (64, 2, 4), (96, 1, 2), (160, 2, 2))
    blocks: list[nn.Module] = []
    channels = 32
    for outputs, stride, depth in stages:
        for index in range(depth):
            blocks.append(InvertedResidual(channels, outputs, 1 if index else stride))
            channels = outputs
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(), *blocks),
        *(nn.Conv2d(channels, 640, 1, bias=False), nn.BatchNorm2d(640), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 10)),
    )


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


class UNet(nn.Module):
    """Three scales with concatenated skips; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double(3, 32), _double(32, 64), _double(64, 128)
        self.up2, self.merge2 = nn.ConvTranspose2d(128, 64, 2, 2), _double(128, 64)
        self.up1, self.merge1 = nn.ConvTranspose2d(64, 32, 2, 2), _double(64, 32)
        self.out = nn.Conv2d(32, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, height, width) to logits (batch, 10, height, width)."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.up2(self.bottom(F.max_pool2d(two, 2)))
        y = self.up1(self.merge2(torch.cat([two, y], 1)))
        out: Tensor = self.out(self.merge1(torch.cat([one, y], 1)))
        return out


def bert() -> nn.Module:
    """Return Hugging Face's BERT: 4 layers of 256 dimensions, 8000 words; nothing is downloaded."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


def zoo(name: str) -> Callable[[], nn.Module]:
    """Return the factory of one of sizewise's own models."""
    return partial(models.build, name, classes=10, image=IMAGES[1:])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "preresnet20": zoo("preresnet20"),
    "resnet18": zoo("resnet18"),
    "densenet40": zoo("densenet40"),
    "mobilenet": mobilenet,
    "unet": UNet,
    "vit_tiny": zoo("vit_tiny"),
    "bert": bert,
}


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of what a model says, in an object or not."""
    out = model(inputs)
    return F.cross_entropy(getattr(out, "logits", out), targets)


STEP = partial(training_step, loss=loss)
OPTIMIZER = partial(SGD, lr=0.01, momentum=0.9)


def milliseconds(work: common.Work) -> float:
    """Return the shortest of three times that some work takes."""
    return 1e3 * min(common.seconds(work) for _ in range(3))


def measure(name: str, repeats: int) -> list[str]:
    """Return a model's rows of the table."""
    torch.manual_seed(0)
    model = MODELS[name]()
    inputs = torch.randint(0, 8000, TEXTS) if name == "bert" else torch.randn(IMAGES)
    pixels = IMAGES[2:] if name == "unet" else ()
    targets = torch.randint(0, 2, (len(inputs), *pixels))
    channels = trace(model, inputs)
    tracing = milliseconds(partial(trace, model, inputs))
    work: dict[str, common.Work] = {}
    cells: dict[str, list[str]] = {}
    for label, ratio in RATIOS.items():
        kept = keep(channels, ratio, rolling(5))
        small = shrink(model, channels, kept).train()
        parameters = sum(parameter.numel() for parameter in small.parameters())
        peak = predict(small, inputs, targets, optimizer=OPTIMIZER, step=STEP).peak
        viewing = milliseconds(partial(view, channels, kept))
        shrinking = milliseconds(partial(shrink, model, channels, kept))
        work[label] = partial(STEP, small, OPTIMIZER(small.parameters()), inputs, targets)
        cells[label] = [f"{parameters:,}", f"{peak:,}", f"{viewing:.1f}", f"{shrinking:.0f}"]
    best = common.best_in_turns(work, repeats)
    rows = []
    for label, (parameters_cell, peak_cell, *cutting) in cells.items():
        traced = f"{tracing:.0f}" if label == "1" else ""
        row = (
            name,
            label,
            parameters_cell,
            peak_cell,
            f"{1e3 * best[label]:.0f}",
            traced,
            *cutting,
        )
        rows.append(f"| {' | '.join(row)} |")
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = common.parser(__doc__)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; default: all")
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    names, repeats = (
        (["preresnet20"], 1) if given.smoke else (given.models or MODELS, given.repeats)
    )
    torch.set_num_threads(1)
    print(common.head(*COLUMNS))
    for name in names:
        for row in measure(name, repeats):
            print(row, flush=True)
    print(f"\n{common.load_average()}")


if __name__ == "__main__":
    main()
