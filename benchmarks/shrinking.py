"""What share of other people's models shrinks with the width, at the sizes they are published in.

    PYTHONPATH=src /tmp/outside/bin/python benchmarks/shrinking.py > benchmarks/shrinking.md

`outside.py` says how the environment is made, and judges small versions of these and many others.
Takes a minute. Models of transformers have no data here, so their size is no matter; layers beyond
the fourth would only repeat what is there.

A parameter's entry shrinks if it lies in a dimension that is cut. Blocks are modules of one class,
side by side in a list; what is around them is embeddings, stems and heads, whose vocabularies,
pixels and classes are never cut.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import common
from outside_modules import Pooled, import_timm
from sizewise.cutting import Channels, keep, shrink, trace
from sizewise.errors import SizewiseError
from sizewise.torch_tools.dry_run import MetaMode

WIDTH = 1 / 4

HEAD = """# How much of a model shrinks

Written by `benchmarks/shrinking.py`, which says what counts. *Shrinks*: the share of the parameters
that lie in a dimension that is cut. *At 1/4*: how many are left at a quarter of the width, where
6.3 % is a quarter of the inputs by a quarter of the outputs.
"""


class Recurrent(nn.Module):
    """A classifier of texts: two layers of a recurrent network, perhaps in both directions."""

    def __init__(self, kind: Callable[..., nn.RNNBase], hidden: int, both: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 256)
        self.rnn = kind(256, hidden, num_layers=2, bidirectional=both, batch_first=True)
        self.head = nn.Linear((1 + both) * hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10) of token ids (B, T)."""
        logits: Tensor = self.head(self.rnn(self.words(x))[0].mean(1))
        return logits


@dataclass(frozen=True)
class Entry:
    """A model of the table: its name, how it is made, and what it takes."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Tensor


def recurrent() -> list[Entry]:
    """Return recurrent networks, which need torch alone."""
    tokens = torch.empty(2, 12, dtype=torch.int64, device="meta")
    return [
        Entry("LSTM, 2 layers of 512", partial(Recurrent, nn.LSTM, 512, False), tokens),
        Entry("GRU, 2 layers of 512, both ways", partial(Recurrent, nn.GRU, 512, True), tokens),
    ]


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"n_layer": 4}),
    "Llama 3.2 1B": (
        "Llama",
        {
            **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8},
            **{"intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 128_256},
        },
    ),
    "Qwen2.5 0.5B": (
        "Qwen2",
        {
            **{"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
            **{"intermediate_size": 4864, "num_hidden_layers": 4, "vocab_size": 151_936},
        },
    ),
    "Qwen3 0.6B": (
        "Qwen3",
        {
            **{"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8},
            **{"head_dim": 128, "intermediate_size": 3072, "num_hidden_layers": 4},
            **{"vocab_size": 151_936},
        },
    ),
    "T5 small, encoder": ("T5Encoder", {}),
    "Bloom 560M": ("Bloom", {"hidden_size": 1024, "n_head": 16, "n_layer": 4}),
    "BERT base": ("Bert", {"num_hidden_layers": 4}),
    "DeBERTa base": (
        "Deberta",
        {"num_hidden_layers": 4, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "DeBERTa v3 small": (
        "DebertaV2",
        {
            **{"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
            **{"num_hidden_layers": 4, "relative_attention": True},
            **{"pos_att_type": ["c2p", "p2c"], "position_buckets": 256, "share_att_key": True},
            **{"norm_rel_ebd": "layer_norm"},
        },
    ),
    "Mamba 130M": ("Mamba", {"hidden_size": 768, "num_hidden_layers": 4}),
}

IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "SegFormer B0": ("Segformer", {}),
    "ViT base (transformers)": ("ViT", {"num_hidden_layers": 4}),
}

TIMM = {
    "ViT tiny (timm)": "vit_tiny_patch16_224",
    "DeiT tiny (timm)": "deit_tiny_patch16_224",
    "Swin tiny (timm)": "swin_tiny_patch4_window7_224",
    "ResNet-18 (timm)": "resnet18",
    "MobileNetV3 small (timm)": "mobilenetv3_small_100",
    "ConvNeXt atto (timm)": "convnext_atto",
}


def published() -> list[Entry]:
    """Return models of transformers and timm."""
    import transformers

    found = []
    tokens = torch.empty(2, 12, dtype=torch.int64, device="meta")
    pixels = torch.empty(2, 3, 224, 224, device="meta")

    def hollow(name: str, options: dict[str, Any], example: Tensor) -> nn.Module:
        known = {**options, "use_cache": False} if example is tokens else options
        config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**known)
        with torch.device("meta"), MetaMode():
            return Pooled(getattr(transformers, f"{name}Model")(config).eval(), example)

    for models, example in ((TEXTS, tokens), (IMAGES, pixels)):
        for label, (name, options) in models.items():
            found.append(Entry(label, partial(hollow, name, options, example), example))
    timm = import_timm()
    for label, name in TIMM.items():
        build = partial(timm.create_model, name, pretrained=False)
        found.append(Entry(label, build, pixels))
    return found


def in_blocks(model: nn.Module) -> set[str]:
    """Return the names of the parameters in blocks."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module)
            for name, child in module.named_children():
                repeated = kinds[type(child)] > 1 and next(child.children(), None) is not None
                if repeated:
                    found |= {f"{path}.{name}.{p}" for p, _ in child.named_parameters()}
    return found


def row(entry: Entry) -> str:
    """Return a line of the table."""
    model = entry.build()
    try:
        channels = trace(model, entry.inputs)
        small = dict(shrink(model, channels, keep(channels, WIDTH)).named_parameters())
    except SizewiseError as error:
        return f"| {entry.name} | | | | | | {error} |"
    every = {name: parameter.numel() for name, parameter in model.named_parameters()}
    blocks = {name: every[name] for name in in_blocks(model) if name in every}
    cells = [f"{sum(every.values()) / 1e6:.1f} M"]
    for names in (blocks, every):
        cells += [_share(channels, names)] if names else [""]
    for names in (blocks, every):
        left = sum(small[name].numel() for name in names)
        cells.append(f"{left / sum(names.values()):.1%}" if names else "")
    return f"| {entry.name} | {' | '.join(cells)} | {'; '.join(channels.notes[:2])} |"


def _share(channels: Channels, names: dict[str, int]) -> str:
    return f"{replace(channels, parameters=tuple(names)).cut_share:.1%}"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    given = parser.parse_args()
    print(HEAD)
    print(
        common.head(
            *("model", "parameters", "blocks shrink", "all shrink", "blocks at 1/4", "all at 1/4"),
            "what stays whole",
        )
    )
    for entry in recurrent() if given.smoke else [*recurrent(), *published()]:
        print(row(entry), flush=True)
        print(entry.name, file=sys.stderr)


if __name__ == "__main__":
    main()
