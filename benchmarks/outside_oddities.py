"""Modules that do one thing each which cutting by width could get wrong without a word."""
# ruff: noqa: D102  (the class says what is odd about it)

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

C = 16


class _Net(nn.Module):
    """A stem, something odd in the middle, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, C, 3, padding=1)
        self.make()
        self.head = nn.Linear(C, 10)

    def make(self) -> None:
        """Make the layers of the middle."""

    def middle(self, x: Tensor) -> Tensor:
        """Return the features (B, C, H, W) of the middle."""
        return x

    def forward(self, x: Tensor) -> Any:
        """Return logits (B, 10)."""
        return self.head(F.relu(self.middle(self.stem(x))).mean((2, 3)))


class _Tokens(_Net):
    """The same on tokens (B, T, C)."""

    def forward(self, x: Tensor) -> Any:
        """Return logits (B, 10)."""
        tokens = F.avg_pool2d(self.stem(x), 8).flatten(2).transpose(1, 2)
        return self.head(self.middle(tokens).mean(1))


class GroupNormWithoutWeights(_Net):
    """Its number of groups is stored, and no tensor says how many channels there are."""

    def make(self) -> None:
        self.norm = nn.GroupNorm(4, C, affine=False)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class GroupNormByFunction(_Net):
    """Groups as a number in the forward."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(F.group_norm(x, 4))


class GroupNormOfOneGroup(_Net):
    """A layer norm in disguise."""

    def make(self) -> None:
        self.norm = nn.GroupNorm(1, C)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class AdaptiveGroupNorm(_Net):
    """Diffusion's: scale and shift come from an embedding."""

    def make(self) -> None:
        self.norm = nn.GroupNorm(4, C, affine=False)
        self.scale = nn.Linear(3, 2 * C)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        features = self.stem(x)
        scale, shift = self.scale(x.mean((2, 3)))[..., None, None].chunk(2, dim=1)
        features = self.conv(self.norm(features) * (1 + scale) + shift)
        return self.head(features.mean((2, 3)))


class WeightStandardisation(_Net):
    """By batch norm of the weight, as timm does it."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        flat = F.batch_norm(weight.reshape(1, C, -1), None, None, training=True)
        return F.conv2d(x, flat.reshape_as(weight), self.conv.bias, padding=1)


class WeightStandardisationByHand(_Net):
    """By mean and standard deviation."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        weight = self.conv.weight
        mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (weight - mean) / (deviation + 1e-5), self.conv.bias, padding=1)


class BatchNormOverTokens(_Tokens):
    """Its channels are positions; batch statistics mix what is cut."""

    def make(self) -> None:
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x))


class LinearAttention(_Tokens):
    """elu + 1 of a channel that is 0 is 1."""

    def make(self) -> None:
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        return q @ (k.transpose(1, 2) @ self.v(x)) / (q @ k.sum(1, keepdim=True).transpose(1, 2))


class SigmoidProducts(_Tokens):
    """sigmoid of a channel that is 0 is a half."""

    def make(self) -> None:
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.q(x)) @ torch.sigmoid(self.k(x)).transpose(1, 2) @ self.v(x)


class SoftplusWeights(_Net):
    """Weights that are positive: softplus of a masked weight is not 0."""

    def make(self) -> None:
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        mixed = F.linear(x.permute(0, 2, 3, 1), F.softplus(self.mix.weight), self.mix.bias)
        return mixed.permute(0, 3, 1, 2)


class EfficientChannelAttention(_Net):
    """ECA: a convolution along the channels."""

    def make(self) -> None:
        self.along = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.along(x.mean((2, 3)).unsqueeze(1))).squeeze(1)
        return self.conv(x * gate[..., None, None])


class GraphAttention(_Tokens):
    """GAT: scores from a vector for each half of a pair."""

    def make(self) -> None:
        self.map = nn.Linear(C, C, bias=False)
        self.left, self.right = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(C))

    def middle(self, x: Tensor) -> Tensor:
        h = self.map(x)
        scores = F.leaky_relu((h @ self.left)[:, :, None] + (h @ self.right)[:, None, :])
        return F.elu(scores.softmax(-1) @ h)


class ConcatBeforeGroups(_Net):
    """Two streams, put together and convolved in two groups."""

    def make(self) -> None:
        self.other = nn.Conv2d(3, C, 1)
        self.conv = nn.Conv2d(2 * C, C, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.conv(torch.cat([self.stem(x), self.other(x)], 1)).mean((2, 3)))


class CircularPadding(_Net):
    """A mode of padding that is an operation of its own."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1, padding_mode="circular")

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class PlainTensor(_Net):
    """A tensor that is neither parameter nor buffer."""

    def make(self) -> None:
        self.factor = torch.rand(C, 1, 1) + 0.5
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x * self.factor.to(x))


class Sinusoids(_Tokens):
    """Positions that are computed from the number of channels in the forward."""

    def make(self) -> None:
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        rate = torch.exp(torch.arange(0, C, 2, dtype=x.dtype, device=x.device) * -(4.0 / C))
        return self.mix(x + torch.cat([torch.sin(at * rate), torch.cos(at * rate)], -1))


class SinusoidsOfTheirSize(Sinusoids):
    """The same, with the number of channels read off the tensor."""

    def middle(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        rate = torch.exp(torch.arange(x.shape[-1], dtype=x.dtype, device=x.device) * -0.1)
        return self.mix(x + torch.sin(at * rate))


class AuxiliaryHead(_Net):
    """A head that runs in training only."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.auxiliary = nn.Linear(C, 10)

    def forward(self, x: Tensor) -> Any:
        features = self.stem(x)
        logits = self.head(F.relu(self.conv(features)).mean((2, 3)))
        if not self.training:
            return logits
        return logits + 0.3 * self.auxiliary(features.mean((2, 3)))


class TwoOutputsInTraining(AuxiliaryHead):
    """Another kind of result in training."""

    def forward(self, x: Tensor) -> Any:
        features = self.stem(x)
        logits = self.head(F.relu(self.conv(features)).mean((2, 3)))
        return (logits, self.auxiliary(features.mean((2, 3)))) if self.training else logits


class OldWeightNorm(_Net):
    """torch's first weight norm keeps a tensor with a history as an attribute."""

    def make(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.conv = torch.nn.utils.weight_norm(nn.Conv2d(C, C, 3, padding=1))

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class NewWeightNorm(_Net):
    """And its second, by parametrisation."""

    def make(self) -> None:
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(C, C, 3, padding=1))

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class SpectralNorm(_Net):
    """A parametrisation with buffers of the weight's sizes."""

    def make(self) -> None:
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(C, C, 3, padding=1))

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class KeepsItsFeatures(_Net):
    """A graph tensor as an attribute, from the last run."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.features: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        self.features = self.conv(x)
        return self.features


class UsedBefore(KeepsItsFeatures):
    """The same after a run: a copy of it fails in torch."""

    def __init__(self) -> None:
        super().__init__()
        self(torch.zeros(1, 3, 8, 8))


class Scripted(_Net):
    """A part that torch.jit has compiled."""

    def make(self) -> None:
        self.conv = torch.jit.script(nn.Sequential(nn.Conv2d(C, C, 3, padding=1), nn.ReLU()))

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x)


class RaisesKeyError(_Net):
    """A forward that fails in its own way on sizes that it does not know."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x) * {C: 1.0}[x.shape[1]]


class RaisesAlways(_Net):
    """A forward with a mistake in it."""

    def middle(self, x: Tensor) -> Tensor:
        raise KeyError("scale")


class StoredHeads(_Tokens):
    """The size of a head is stored, the number of heads is what comes out."""

    def make(self) -> None:
        self.size = 4
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CountedHeads(_Tokens):
    """The number of heads is stored, their size is what comes out."""

    def make(self) -> None:
        self.heads = 4
        self.qkv = nn.Linear(C, 3 * C)
        self.out = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class BroadcastMap(_Net):
    """A map of one channel, added to all: broadcasting hides what a cut does to it."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)
        self.map = nn.Conv2d(C, 1, 1)

    def middle(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.map(y)


class SqueezeExcite(_Net):
    """A gate for each channel, from all of them."""

    def make(self) -> None:
        self.down, self.up = nn.Conv2d(C, 4, 1), nn.Conv2d(4, C, 1)

    def middle(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class PixelShuffle(_Net):
    """Channels that become pixels."""

    def make(self) -> None:
        self.wide = nn.Conv2d(C, 4 * C, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def middle(self, x: Tensor) -> Tensor:
        return self.shuffle(self.wide(x))


class ChannelShuffle(_Net):
    """ShuffleNet's."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1, groups=4)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(F.channel_shuffle(x, 4))


class SoftmaxOverChannels(_Net):
    """A sum over all channels, of a function that is not 0 at 0."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x.softmax(1))


class NormalisedFeatures(_Net):
    """Cosine similarities."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return F.normalize(self.conv(F.normalize(x, dim=1)), dim=1)


class MeanOverChannels(_Net):
    """CBAM's spatial attention: mean and maximum over the channels."""

    def make(self) -> None:
        self.map = nn.Conv2d(2, 1, 3, padding=1)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        spread = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return self.conv(x * torch.sigmoid(self.map(spread)))


class Maxout(_Net):
    """The largest of pairs of neighbouring channels."""

    def make(self) -> None:
        self.wide = nn.Conv2d(C, 2 * C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.wide(x).unflatten(1, (C, 2)).amax(2)


class GatedUnits(_Net):
    """One half of the channels gates the other."""

    def make(self) -> None:
        self.wide = nn.Conv2d(C, 2 * C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return F.glu(self.wide(x), dim=1)


class BilinearPooling(_Net):
    """Products of all pairs of channels."""

    def make(self) -> None:
        self.mix = nn.Linear(C * C, C)

    def middle(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        pairs = flat @ flat.transpose(1, 2) / flat.shape[-1]
        return self.mix(pairs.flatten(1))[..., None, None]


class Recurrent(_Tokens):
    """An LSTM stores sizes everywhere."""

    def make(self) -> None:
        self.lstm = nn.LSTM(C, C, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class RmsNormByHand(_Tokens):
    """The mean of the squares of all channels."""

    def make(self) -> None:
        self.weight = nn.Parameter(torch.ones(C))
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        return self.mix(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight)


class RmsNorm(_Tokens):
    """torch's own."""

    def make(self) -> None:
        self.norm = nn.RMSNorm(C)
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x))


class LayerNormOfTwoDimensions(_Tokens):
    """Statistics over positions and channels."""

    def make(self) -> None:
        self.norm = nn.LayerNorm((16, C))
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x))


class InstanceNorm(_Net):
    """Statistics of one channel of one sample."""

    def make(self) -> None:
        self.norm = nn.InstanceNorm2d(C)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class LocalResponseNorm(_Net):
    """A sum over neighbouring channels."""

    def make(self) -> None:
        self.norm = nn.LocalResponseNorm(3)
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class ThreeDimensions(nn.Module):
    """Volumes."""

    SHAPE = (3, 8, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, C, 3, padding=1), nn.BatchNorm3d(C), nn.ReLU(), nn.Conv3d(C, C, 3)
        )
        self.head = nn.Linear(C, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        return self.head(self.body(x).mean((2, 3, 4)))


class UpAndDown(_Net):
    """A small U-Net with transposed convolutions."""

    def make(self) -> None:
        self.down = nn.Conv2d(C, 2 * C, 4, 2, 1)
        self.up = nn.ConvTranspose2d(2 * C, C, 4, 2, 1)
        self.join = nn.Conv2d(2 * C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([x, F.relu(self.up(F.relu(self.down(x))))], 1))


class TorchTransformer(_Tokens):
    """nn.TransformerEncoderLayer."""

    def make(self) -> None:
        self.layer = nn.TransformerEncoderLayer(C, 4, 24, batch_first=True, dropout=0.0)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x)


class FourierMixing(_Tokens):
    """FNet: a Fourier transform over the channels."""

    def make(self) -> None:
        self.mix = nn.Linear(C, C)

    def middle(self, x: Tensor) -> Tensor:
        return self.mix(torch.fft.fft(x, dim=-1).real)


class Polynomial(_Net):
    """cos of a channel that is 0 is 1; a convolution reads it with masked weights."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(torch.cos(x))


class CosineSum(_Net):
    """cos of a channel that is 0 is 1, and a plain sum reads it."""

    def make(self) -> None:
        self.conv = nn.Conv2d(C, C, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        return self.conv(x) * torch.cos(x).sum(1, keepdim=True)


ODDITIES = [
    kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.startswith("_")
]
"""All of them."""
