"""Small models with one layer each that treats channels in a way of its own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES = torch.empty(2, 3, 8, 8, device="meta")
TOKENS = torch.empty(2, 5, 6, device="meta")


class Pictures(nn.Module):
    """A layer of 8 channels in, some out, between convolutions."""

    def __init__(self, layer: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, 8, 3, padding=1), layer
        self.mix, self.head = nn.Conv2d(channels, 12, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.layer(self.stem(x))).relu().mean((2, 3)))


class Words(nn.Module):
    """A layer of tokens (B, T, 8) in, (B, T, n) out, between linear ones."""

    def __init__(self, layer: nn.Module, channels: int = 8) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(6, 8), layer
        self.mix, self.head = nn.Linear(channels, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.layer(self.embed(x))).relu())


class Does(nn.Module):
    """Any function of a tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class AdaptiveNorm(nn.Module):
    """Group norm without weights, then a scale and a shift that depend on the input (AdaGN)."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.affine(x.mean((2, 3)))[..., None, None].chunk(2, 1)
        return F.group_norm(x, 4) * (1 + scale) + shift


class Standardised(nn.Conv2d):
    """Weights of mean 0 and variance 1, by a batch norm over them."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


class StandardisedByHand(nn.Conv2d):
    """The same by variance and mean."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, [1, 2, 3], keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias, padding=1)


class Attention(nn.Module):
    """Features of queries and keys without a softmax over keys: linear attention and the like."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        of_keys: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.function, self.of_keys = function, of_keys or function

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.function(self.query(x)), self.of_keys(self.key(x))
        return query @ (key.transpose(-2, -1) @ self.value(x)) / x.shape[1]


class PositiveWeights(nn.Module):
    """A product with weights that are never zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.sigmoid(), F.softplus(self.weight))


class ChannelAttention(nn.Module):
    """ECA: a convolution that slides over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.slide = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.slide(x.mean((2, 3)).unsqueeze(1)).squeeze(1).sigmoid()
        return x * weights[..., None, None]


class GraphAttention(nn.Module):
    """GAT: a logit for every pair of nodes from both of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        source, target = (x * self.source).sum(-1), (x * self.target).sum(-1)
        logits = F.leaky_relu(source[:, :, None] + target[:, None, :])
        return logits.softmax(-1) @ x


class JoinedGroups(nn.Module):
    """Two branches side by side, which a grouped convolution takes apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(torch.cat([self.left(x), self.right(x)], 1))


class PlainTensor(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.linspace(0, 1, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offsets


def sinusoids(x: Tensor) -> Tensor:
    """Add positions that are computed anew."""
    channels = torch.arange(x.shape[-1], device=x.device) / x.shape[-1]
    return x + (torch.arange(x.shape[1], device=x.device)[:, None] * channels.exp()).sin()


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "functional group norm": (
        lambda: Pictures(Does(lambda x: F.group_norm(x, 4))),
        "native_group_norm in layer has a fixed number of groups",
    ),
    "AdaGN": (lambda: Pictures(AdaptiveNorm()), "native_group_norm in layer has a fixed number"),
    "weights by batch norm": (
        lambda: Pictures(Standardised(8, 8, 3, padding=1)),
        "native_batch_norm in layer takes statistics over channels",
    ),
    "weights by variance": (
        lambda: Pictures(StandardisedByHand(8, 8, 3, padding=1)),
        "var_mean in layer mixes channels",
    ),
    "batch norm of tokens": (
        lambda: Words(nn.BatchNorm1d(5)),
        "native_batch_norm in layer takes statistics over channels",
    ),
    "instance norm of tokens": (
        lambda: Words(nn.InstanceNorm1d(5, affine=True)),
        "native_batch_norm in layer takes statistics over channels",
    ),
    "linear attention": (
        lambda: Words(Attention(lambda x: F.elu(x) + 1)),
        "bmm in layer multiplies channels that are not zero where they are dropped",
    ),
    "sigmoids": (
        lambda: Words(Attention(torch.sigmoid, torch.cos)),
        "bmm in layer multiplies channels that are not zero where they are dropped",
    ),
    "softplus weights": (
        lambda: Words(PositiveWeights()),
        "mm in layer multiplies channels that are not zero where they are dropped",
    ),
    "changed in place": (
        lambda: Words(Attention(lambda x: x.add_(1))),
        "bmm in layer multiplies channels that are not zero where they are dropped",
    ),
    "ECA": (
        lambda: Pictures(ChannelAttention()),
        "convolution in layer.slide slides over channels",
    ),
    "GAT": (lambda: Words(GraphAttention()), "sum in layer mixes channels"),
    "joined groups": (
        lambda: Pictures(JoinedGroups()),
        "convolution in layer.grouped ties all channels of a dimension to each other",
    ),
    "circular padding": (
        lambda: Pictures(nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")),
        "copy in layer pairs channels with something that is whole",
    ),
    "plain tensor": (
        lambda: Words(PlainTensor()),
        "add in layer pairs channels with something that is whole",
    ),
    "sinusoids": (
        lambda: Words(Does(sinusoids)),
        "add in layer pairs channels with something that is whole",
    ),
    "largest channel": (
        lambda: Words(Does(lambda x: x - x.max(-1, keepdim=True).values)),
        "max in layer mixes channels",
    ),
    "length": (
        lambda: Words(Does(lambda x: F.normalize(x, dim=-1))),
        "linalg_vector_norm in layer mixes channels",
    ),
    "deviation": (
        lambda: Words(Does(lambda x: x / (1 + x.std(-1, keepdim=True)))),
        "std in layer mixes channels",
    ),
    "product": (
        lambda: Words(Does(lambda x: x * x.prod(-1, keepdim=True))),
        "prod in layer mixes channels",
    ),
    "log of a sum": (
        lambda: Words(Does(lambda x: x - x.logsumexp(-1, keepdim=True))),
        "logsumexp in layer mixes channels",
    ),
    "topmost": (
        lambda: Words(Does(lambda x: x.topk(4, -1).values), 4),
        "topk in layer is not understood",
    ),
    "running product": (
        lambda: Words(Does(lambda x: x.cumprod(-1))),
        "cumprod in layer is not understood",
    ),
}
"""Models in which something stays whole, each with the beginning of the note that says so."""

CUT: dict[str, Callable[[], nn.Module]] = {
    "group norm without weights": lambda: Pictures(nn.GroupNorm(4, 8, affine=False)),
    "instance norm without weights": lambda: Pictures(nn.InstanceNorm2d(8)),
    "one side is zero": lambda: Words(Attention(F.relu, torch.sigmoid)),
    "statistics over tokens": lambda: Words(Does(lambda x: x / (1 + x.std(1, keepdim=True)))),
    "lengths over tokens": lambda: Words(Does(lambda x: F.normalize(x, dim=1))),
    "largest token": lambda: Words(Does(lambda x: x - x.max(1, keepdim=True).values)),
}
"""Models of which nothing has to be left whole."""


def example(model: nn.Module) -> Tensor:
    """Return a meta tensor of what a model of these takes."""
    return IMAGES if isinstance(model, Pictures) else TOKENS
