"""Models with adapters as folders that others read: of `peft`, or of `transformers`, merged.

Each is read again with that library, and what was read is returned to be compared with the model.
"""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from sizewise.errors import ConfigError
from sizewise.families.lora.adapters import DOWN, UP, adapted
from sizewise.models.from_transformers import Logits
from sizewise.torch_tools.stored import restore
from sizewise.training.loop import own_tensors

ADAPTER = "adapter_model.safetensors"


def write_adapters(module: nn.Module, learned: Collection[str], base: str, out: Path) -> nn.Module:
    """Write a model's adapters and head into a folder that `PeftModel.from_pretrained` reads.

    Args:
        module: The model.
        learned: The names of its tensors that were trained.
        base: What the base is called, if it has a name.
        out: The folder.

    Returns:
        The base with what was read from the folder.
    """
    from peft import LoraConfig, PeftModel

    wrapped = _transformers(module)
    layers = adapted(wrapped.model)
    if not any(layer.lora_B["default"].weight.any() for layer in layers.values()):
        raise ConfigError(
            "the model has no adapter that does anything: what was learned is in its base, as with "
            "flora, or there is none; export it as .transformers instead"
        )
    own = own_tensors(module)
    names = {n: n.removeprefix("model.") for n in own if n in learned or n.endswith(DOWN)}
    heads = [n.rpartition(".")[0] for n in names.values() if not n.endswith((DOWN, UP))]
    first = next(iter(layers.values()))
    LoraConfig(
        r=first.r["default"],
        lora_alpha=first.scaling["default"] * first.r["default"],
        target_modules=list(layers),
        modules_to_save=list(dict.fromkeys(heads)) or None,
        fan_in_fan_out=getattr(first, "fan_in_fan_out", False),
        base_model_name_or_path=base,
        inference_mode=True,
        task_type="CAUSAL_LM" if wrapped.following else "SEQ_CLS",
    ).save_pretrained(str(out))
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": own[full].detach().contiguous()
        for full, name in names.items()
    }
    save_file(tensors, out / ADAPTER, metadata={"format": "pt"})
    bare = copy.deepcopy(wrapped)
    for name, layer in adapted(bare.model).items():
        bare.model.set_submodule(name, layer.base_layer)
    bare.model = PeftModel.from_pretrained(bare.model, str(out))
    return bare.eval()


def write_merged(module: nn.Module, out: Path) -> nn.Module:
    """Write a model with its adapters merged, as a folder that `transformers` reads.

    Returns:
        What was read from it.
    """
    from transformers.utils import logging as transformers_logging

    merged = copy.deepcopy(_transformers(module))
    restore(merged)
    for name, layer in adapted(merged.model).items():
        layer.merge()
        merged.model.set_submodule(name, layer.base_layer)
    library: Any = merged.model
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    library.save_pretrained(str(out))
    attention = library.config._attn_implementation
    read = type(library).from_pretrained(str(out), attn_implementation=attention)
    return Logits(read, merged.pad, merged.following).eval()


def _transformers(module: nn.Module) -> Logits:
    if not isinstance(module, Logits):
        raise ConfigError(
            "only models of transformers, with a name like 'transformers:LlamaForCausalLM', can be "
            "exported as .peft or .transformers; use .safetensors"
        )
    return module
