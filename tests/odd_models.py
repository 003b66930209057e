"""Models that nobody wrote a narrow version of, for the tests of tracing and cutting."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class InvertedResidual(nn.Module):
    """MobileNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.expand = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)
        )
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.squeeze = nn.Conv2d(hidden, hidden // 4, 1)
        self.excite = nn.Conv2d(hidden // 4, hidden, 1)
        self.project = nn.Sequential(
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.depthwise(self.expand(x))))
        gate = self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        y = self.project(y * gate)
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """Depthwise convolutions, squeeze and excite, and a flattened feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 2, 1, bias=False)
        self.blocks = nn.Sequential(
            InvertedResidual(12, 12, 1), InvertedResidual(12, 18, 2), InvertedResidual(18, 18, 1)
        )
        self.hidden = nn.Linear(18 * 2 * 2, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2)
        return self.head(F.dropout(F.relu(self.hidden(x.flatten(1))), training=self.training))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(6, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Skips that are concatenated, transposed convolution, resampling; an image comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double(3, 12), _double(12, 18), _double(18, 24)
        self.up2 = nn.ConvTranspose2d(24, 18, 2, stride=2)
        self.merge2 = _double(36, 18)
        self.merge1 = _double(18 + 12, 12)
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = self.up2(self.bottom(F.max_pool2d(two, 2)))
        y = self.merge2(torch.cat([two, y], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.merge1(torch.cat([y, one], 1)))


class Grouped(nn.Module):
    """ResNeXt's block: a grouped convolution inside a residual stream; and a channel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.reduce = nn.Conv2d(16, 24, 1)
        self.grouped = nn.Conv2d(24, 36, 3, padding=1, groups=12)
        self.norm = nn.BatchNorm2d(36)
        self.expand = nn.Conv2d(36, 16, 1)
        self.multiplied = nn.Conv2d(16, 32, 3, groups=16)
        self.shuffled = nn.Conv2d(32, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.expand(F.relu(self.norm(self.grouped(self.reduce(x)))))
        x = self.multiplied(x).relu()
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        x = self.shuffled(x.reshape(batch, channels, height, width)).relu()
        return self.head(x.mean((-1, -2)))


class Odd(nn.Module):
    """Gates, shared layers, bare parameters, attention by hand, a decoder: things users do."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 12)
        self.position = nn.Parameter(torch.randn(7, 12))
        self.scale = nn.Parameter(torch.ones(12))
        self.gated = nn.Linear(12, 40)
        self.back = nn.Linear(20, 12)
        self.heads = nn.Linear(12, 3 * 24)
        self.out = nn.Linear(24, 12, bias=False)
        self.norm = nn.LayerNorm(12, elementwise_affine=False)
        self.decode = nn.Linear(12, 8 * 2 * 2)
        self.draw = nn.ConvTranspose2d(8, 6, 2, bias=False)
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.head = nn.Linear(6, 12)
        self.unused = nn.Linear(4, 4)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.heads(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.unbind(0)
        weights = (query @ key.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) * self.scale + self.position
        for _ in range(2):  # The same layers twice.
            value, gate = self.gated(self.norm(x)).chunk(2, -1)
            x = x + self.back(value * gate.sigmoid())
            x = x + self.attend(x)
        image = self.decode(x.mean(1)).unflatten(1, (-1, 2, 2))
        image = self.instance(self.draw(image)).relu()
        # The embedding again, as the classifier.
        return self.head(image.amax((2, 3))) @ self.token.weight.t()


class Encoder(nn.Module):
    """Torch's own transformer layers around a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 13)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


def bert() -> nn.Module:
    """Hugging Face's BERT with a classifier, tiny, from a config: nothing is downloaded."""
    # Here, as it takes seconds that only the tests that use it should pay.
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        num_labels=5,
    )
    return BertForSequenceClassification(config)
