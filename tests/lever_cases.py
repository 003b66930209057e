"""Ten small models that levers are tried on, and one step of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from sizewise import models
from sizewise.steps.levers import Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step

IMAGE = (3, 16, 16)
BATCH = 6

RECIPES = {
    "sgd": Recipe(momentum=0.0, lr=0.05),
    "momentum": Recipe(lr=0.05),
    "adam": Recipe(optimizer="adam", lr=1e-3),
}


class GroupNormCNN(nn.Module):
    """Two blocks in a list, a bare parameter, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Depthwise(nn.Sequential):
    """As a mobile network: expand, filter each channel, project."""

    def __init__(self) -> None:
        def inverted() -> nn.Module:
            layers = [nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
            layers += [nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24)]
            return nn.Sequential(*layers, nn.ReLU6(), nn.Conv2d(24, 8, 1, bias=False))

        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), inverted(), inverted(), *head)


class Recurrent(nn.Module):
    """Recurrent layers one after another, with dropout between them."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(n, 16, batch_first=True) for n in (48, 16))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2).flatten(1).view(len(x), -1, 48)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        out: Tensor = self.head(x[:, -1])
        return out


class Encoder(nn.Module):
    """A BERT of `transformers`, which takes token ids."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=10,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=x).logits
        return logits


def _zoo(name: str, width: float = 1.0, **options: Any) -> nn.Module:
    return models.build(name, classes=10, image=IMAGE, width=width, args=options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": partial(_zoo, "cnn", layers=[8, 12, 16]),
    "group norm": GroupNormCNN,
    "preresnet": partial(_zoo, "preresnet20", width=0.25),
    "vit": partial(_zoo, "vit", dim=16, depth=2, heads=2, dropout=0.1),
    "mlp": partial(_zoo, "mlp", hidden=[40, 30, 20]),
    "encoder": Encoder,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
    "densenet": partial(_zoo, "densenet22", width=0.5),
    "depthwise": Depthwise,
}


def built(name: str) -> nn.Module:
    """Return a model, the same each time."""
    torch.manual_seed(1)
    return MODELS[name]().train()


def batch(name: str, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return inputs of a model, and labels, the same each time."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 10, (size,), generator=generator)
    if name == "encoder":
        return torch.randint(1, 50, (size, 12), generator=generator), labels
    return torch.randn(size, *IMAGE, generator=generator), labels


def checkpoints(name: str) -> Levers:
    """Return the lever that checkpoints a model; recurrent layers have to be named."""
    return Levers(checkpoint=True, blocks=("layers",) if name in ("lstm", "gru") else ())


def stepped(
    module: nn.Module, name: str, levers: Levers, recipe: Recipe, steps: int = 3, **options: Any
) -> list[Tensor]:
    """Take some steps, the same random numbers each time; return the losses."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(recipe, parameters, recipe.lr, levers)
    torch.manual_seed(3)
    options = {"clip": recipe.clip, "proximal": recipe.proximal, **options}
    run = partial(training_step, module, optimizer, *batch(name))
    return [run(levers=levers, **options) for _ in range(steps)]


def same_bits(first: nn.Module, second: nn.Module) -> bool:
    """Return whether two modules hold the same values under the same names."""
    theirs = second.state_dict()
    ours = first.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in ours)
