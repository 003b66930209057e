"""Small models that cannot be run part by part, for tests; each has a slow obvious reference."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

BLOCKS = 3


class Layer(nn.Module):
    """Attention that is told of a mask by keyword; gives a tuple, and hands on a bias beside."""

    def __init__(self, dim: int, first: bool) -> None:
        super().__init__()
        self.kind = "full"
        self.norm = nn.LayerNorm(dim)
        self.mixing = nn.Linear(dim, dim)
        self.bias = nn.Linear(1, 1) if first else None

    def forward(
        self, x: Tensor, *, mask: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.bias is not None:
            bias = self.bias(torch.ones(len(x), 1))
        mixed = (torch.tanh(self.mixing(self.norm(x))) * mask).mean(1, keepdim=True)
        return x + mixed + (0.0 if bias is None else bias[:, None]), bias


class Layers(nn.Module):
    """The encoder of the model below, as libraries have one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(dim, number == 0) for number in range(BLOCKS))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        bias = None
        for layer in self.layer:
            assert layer.kind == "full"
            x, bias = layer(x, mask=mask, bias=bias)
        return (x,)


class Tokens(nn.Module):
    """A class token, positions, a mask that is made once, a scale after the blocks, a norm."""

    def __init__(self, *, classes: int, image: tuple[int, int, int], dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(image[0] * image[2], dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 1 + image[1], dim))
        self.encoder = Layers(dim)
        self.norm = nn.LayerNorm(dim)
        self.scale = nn.Parameter(torch.full((dim,), 1.5))
        self.classifier = nn.Linear(dim, classes)

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.embed(x.transpose(1, 2).flatten(2))
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        mask = torch.cat([torch.ones(len(x), 1), (x.sum((1, 3)) > 0).float()], 1)[..., None]
        return tokens, mask

    def end(self, x: Tensor, mask: Tensor) -> Tensor:
        pooled = (self.norm(x) * self.scale * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.classifier(pooled)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        tokens, mask = self.start(x)
        return self.end(self.encoder(tokens, mask)[0], mask)

    def hidden(self, x: Tensor, runs: Collection[int]) -> list[Tensor]:
        """Return the hidden tensors before and after each block, if only some blocks run."""
        tokens, mask = self.start(x)
        found, bias = [tokens], None
        for number, layer in enumerate(self.encoder.layer):
            if number in runs:
                tokens, bias = layer(tokens, mask=mask, bias=bias)
            found.append(tokens)
        return found

    def logits(self, x: Tensor, runs: Collection[int]) -> Tensor:
        return self.end(self.hidden(x, runs)[-1], self.start(x)[1])


class Residual(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        out += x
        return out.relu()


class Stage(nn.Module):
    """Blocks behind a convolution that halves the image."""

    def __init__(self, inputs: int, channels: int, count: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = block(x)
        return x


class Stages(nn.Module):
    """Stages, between which the image is scaled, and pooling in forward."""

    def __init__(self, *, classes: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(image[0], 4, 3, padding=1), nn.BatchNorm2d(4)
        self.scales = nn.Parameter(torch.tensor([2.0, 0.5]))
        self.stages = nn.ModuleList([Stage(4, 4, 2), Stage(4, 8, 2)])
        self.classifier = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.stages[0](x)
        x = self.stages[1](x * self.scales[0])
        logits: Tensor = self.classifier(x.mean((2, 3)) * self.scales[1])
        return logits


class Adding(Residual):
    """A residual block of whose result nothing is kept for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(self.norm(x).relu())
        return out


class Altering(nn.Module):
    """What blocks give is changed in place afterwards."""

    def __init__(self, *, classes: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(image[0], 4, 3, padding=1)
        self.blocks = nn.ModuleList(Adding(4) for _ in range(3))
        self.classifier = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for block in self.blocks:
            x = block(x)
            x += 1
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits

    def hidden(self, x: Tensor) -> list[Tensor]:
        """Return what every block gives."""
        x, found = self.conv(x), []
        for block in self.blocks:
            found.append(block(x))
            x = found[-1] + 1
        return found


class SharedLayers(nn.Module):
    """One layer, called again and again."""

    def __init__(self, *, classes: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(image[0], 4, 3, padding=1)
        self.layer = Residual(4)
        self.classifier = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for _ in range(3):
            x = self.layer(x)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class Ladder(nn.Module):
    """The head sees what every block gives."""

    def __init__(self, *, classes: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(image[0], 4, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(4) for _ in range(3))
        self.classifier = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.conv(x), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        logits: Tensor = self.classifier(sum(seen).mean((2, 3)))
        return logits


class Layerless(nn.Module):
    """Nothing but one layer."""

    def __init__(self, *, classes: int, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.only = nn.Linear(image[1] * image[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.only(x.mean(1).flatten(1))
        return logits
