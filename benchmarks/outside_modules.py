"""Modules that were written without sizewise in mind: of timm, of transformers, and odd ones.

Each is a factory and the shape of its input, small enough to be run in a moment. `named` gives all.
"""

import sys
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

from outside_oddities import ODDITIES

IMAGE = (3, 32, 32)
TOKENS = (12,)
WORDS = 50


@dataclass(frozen=True)
class Module:
    """A module to cut.

    Attributes:
        origin: timm, transformers, or oddity.
        name: Its name there.
        build: Makes it.
        shape: Shape of one sample; one number is a length of token ids.
    """

    origin: str
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = field(default=IMAGE)

    def inputs(self, generator: torch.Generator) -> Tensor:
        """Return four random samples, in float64 if they are no token ids."""
        if len(self.shape) == 1:
            return torch.randint(3, WORDS, (4, *self.shape), generator=generator)
        return torch.randn(4, *self.shape, dtype=torch.float64, generator=generator)


# ---- timm

TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnet18": {},
    "resnet26": {},
    "resnext26ts": {},
    "seresnext26ts": {},
    "eca_resnext26ts": {},
    "gcresnext26ts": {},
    "skresnet18": {},
    "resnetv2_18": {},
    "resnetv2_50x1_bit": {},
    "nf_resnet26": {},
    "nf_regnet_b0": {},
    "test_nfnet": {},
    "regnetx_002": {},
    "regnety_002": {},
    "efficientnet_lite0": {},
    "test_efficientnet": {},
    "test_efficientnet_gn": {},
    "test_efficientnet_ln": {},
    "test_efficientnet_evos": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "mixnet_s": {},
    "tinynet_e": {},
    "lcnet_035": {},
    "ghostnet_050": {},
    "rexnet_100": {},
    "densenet121": {},
    "dla46_c": {},
    "hrnet_w18_small": {},
    "ese_vovnet19b_slim_dw": {},
    "repvgg_a0": {},
    "mobileone_s0": {},
    "selecsls42": {},
    "res2net50_14w_8s": {},
    "cspresnet50": {},
    "halonet26t": {"image": 64},
    "botnet26t_256": {"image": 64, "img_size": 64},
    "lambda_resnet26t": {"image": 64, "img_size": 64},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "inception_next_atto": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "test_vit": {"img_size": 32},
    "test_vit2": {"img_size": 32},
    "cait_xxs24_224": {"img_size": 32, "patch_size": 8, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 96},
    "xcit_nano_12_p16_224": {"depth": 2},
    "pit_ti_224": {"img_size": 64},
    "coat_lite_tiny": {"img_size": 32},
    "convit_tiny": {"img_size": 32, "patch_size": 8, "depth": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "image": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (3, 6),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "image": 64,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (3, 6),
    },
    "mixer_s32_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "poolformer_s12": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "edgenext_xx_small": {},
    "visformer_tiny": {"img_size": 64},
    "levit_128s": {"img_size": 64},
    "pvt_v2_b0": {},
    "twins_svt_small": {"img_size": 64},
    "efficientformer_l1": {"image": 224},
    "sequencer2d_s": {"img_size": 56},
    "mambaout_femto": {},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "fastvit_t8": {},
    "efficientvit_b0": {},
    "starnet_s1": {},
    "hgnetv2_b0": {},
    "tiny_vit_5m_224": {"image": 64},
    "crossvit_tiny_240": {},
}


def import_timm() -> Any:
    """Return timm, imported with a stub of torchvision, which it wants for its data only."""

    class Stub(types.ModuleType):
        __path__: list[str] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
            return type(name, (nn.Module,), {mode: mode for mode in modes})

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            return ModuleSpec(name, Finder) if name.partition(".")[0] == "torchvision" else None  # type: ignore[arg-type]

        @staticmethod
        def create_module(spec: ModuleSpec) -> types.ModuleType:
            return Stub(spec.name)

        @staticmethod
        def exec_module(module: types.ModuleType) -> None:
            pass

    sys.meta_path.append(Finder)
    import timm

    # transformers must not find it.
    sys.meta_path.remove(Finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return timm


def _timm() -> list[Module]:
    timm, found = import_timm(), []
    for name, given in TIMM.items():
        options = dict(given)
        size = options.pop("image", options.get("img_size", 240 if "crossvit" in name else 32))
        build = partial(timm.create_model, name, pretrained=False, num_classes=10, **options)
        found.append(Module("timm", name, build, (3, size, size)))
    return found


# ---- transformers

_TEXT = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_D_MODEL = {**_TEXT, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
_IMAGE = {**_TEXT, "image_size": 32, "patch_size": 8}
_STAGES = {"num_channels": 3, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32]}

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Bert": _TEXT,
    "DistilBert": {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Roberta": _TEXT,
    "Albert": {**_TEXT, "embedding_size": 16},
    "Electra": {**_TEXT, "embedding_size": 16},
    "MobileBert": {**_TEXT, "embedding_size": 16, "intra_bottleneck_size": 16},
    "Deberta": {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2": {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "ConvBert": {**_TEXT, "embedding_size": 32},
    "FNet": _TEXT,
    "ModernBert": {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2},
    "GPT2": {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "OPT": {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": _TEXT,
    "Llama": {**_TEXT, "num_key_value_heads": 2},
    "Qwen2": {**_TEXT, "num_key_value_heads": 2},
    "Mistral": {**_TEXT, "num_key_value_heads": 2},
    "Mixtral": {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 2},
    "Phi": _TEXT,
    "Gemma": {**_TEXT, "num_key_value_heads": 2, "head_dim": 8},
    "Bloom": {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {**_TEXT, "new_decoder_architecture": False},
    "T5Encoder": {
        "vocab_size": WORDS,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    },
    "Mamba": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "ViT": _IMAGE,
    "DeiT": _IMAGE,
    "Beit": _IMAGE,
    "Dinov2": _IMAGE,
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [3, 6],
        "window_size": 4,
    },
    "ConvNext": _STAGES,
    "ConvNextV2": _STAGES,
    "ResNet": {**_STAGES, "embedding_size": 16},
    "RegNet": {**_STAGES, "embedding_size": 16, "groups_width": 8},
    "PoolFormer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "Segformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "MobileNetV2": {},
    "PvtV2": {
        "image_size": 32,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
    },
}


class Pooled(nn.Module):
    """A backbone of transformers with a linear head on the mean of its last hidden states."""

    def __init__(self, backbone: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.no_grad():
            hidden = backbone(example).last_hidden_state
        self.channels = 1 if hidden.ndim == 4 else -1
        self.head = nn.Linear(hidden.shape[self.channels], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        hidden = self.backbone(x).last_hidden_state
        return self.head(hidden.mean((2, 3) if self.channels == 1 else 1))


def _backbone(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> nn.Module:
    import transformers

    stem = name.removesuffix("Encoder")
    options = {**options, "use_cache": False} if len(shape) == 1 else options
    config = getattr(transformers, f"{stem}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).eval()
    example = torch.ones(1, *shape, dtype=torch.long) if len(shape) == 1 else torch.zeros(1, *shape)
    return Pooled(model, example)


def _transformers() -> list[Module]:
    images = list(TRANSFORMERS)[list(TRANSFORMERS).index("ViT") :]
    found = []
    for name, options in TRANSFORMERS.items():
        shape = IMAGE if name in images else TOKENS
        found.append(Module("transformers", name, partial(_backbone, name, options, shape), shape))
    return found


def named(wanted: Collection[str] = ()) -> list[Module]:
    """Return the modules with these names or of these origins; all, if none is named.

    timm is imported if it may hold one of them.
    """
    found = [
        Module("oddity", kind.__name__, kind, getattr(kind, "SHAPE", IMAGE)) for kind in ODDITIES
    ]
    found += _transformers()
    if not set(wanted) or set(wanted) - {part for m in found for part in (m.name, m.origin)}:
        found += _timm()
    return [m for m in found if not wanted or {m.name, m.origin} & set(wanted)]
