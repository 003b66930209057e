"""Adapters in a model: which layers get one, which blocks they lie in, what learns beside them.

An adapter of rank r beside a frozen layer W adds s B A: A is (r, inputs), B is (outputs, r), and
both are layers of `peft`. The scale s is the same for every rank, so that a row of A and a column
of B mean the same whatever the rank of the device that trains them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.common.structure import nearest
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import Submodel
from sizewise.exchange.view import Tensors

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""How the names of A and of B end."""

HEADS = ("head", "heads", "classifier", "pre_classifier", "score", "fc")
"""Names of layers behind the last block that begin anew in every task."""


@dataclass(frozen=True)
class Rank(Submodel):
    """Adapters of a rank in the last blocks of the model.

    Attributes:
        rank: Rows of A, columns of B.
        depth: How many of the last blocks have adapters; 0: all.
    """

    rank: int = 1
    depth: int = 0

    @property
    def label(self) -> str:
        """What people call it."""
        where = f", last {self.depth} block{'s' * (self.depth > 1)}" if self.depth else ""
        return f"rank {self.rank}{where}"


@dataclass(frozen=True)
class Places:
    """Where a model is changed.

    Attributes:
        blocks: For each block in order, the names of its layers that get an adapter.
        head: Names of modules that learn as a whole.
    """

    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]

    def targets(self, depth: int) -> list[str]:
        """Return the layers that get an adapter in the last so many blocks; 0: in all."""
        return [name for block in self.blocks[-depth:] for name in block]


def find(
    model: nn.Module, targets: Sequence[str], head: Sequence[str] | None, *, classifies: bool
) -> Places:
    """Find out where a model is changed.

    Args:
        model: The model, without adapters.
        targets: Names of layers, or how such names end, as in a `LoraConfig`; none: all linear
            layers and convolutions of the blocks.
        head: Names of modules, or how these end, that learn as a whole; None: the classifier.
        classifies: Whether the model has a classifier.

    Raises:
        ConfigError: A name fits nothing.
    """
    layers = dict(model.named_modules())
    if head is None:
        own = [name for name in layers if _ends(name, HEADS) and not block_of(name)]
        linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        head = (own or linear[-1:]) if classifies else []
    else:
        head = _named(layers, head, "method.head")
    heads = tuple(name for name in head if not inside(name, set(head) - {name}))
    fit = {n: m for n, m in layers.items() if _adaptable(m) and not inside(n, heads)}
    if targets:
        chosen = [name for name in _named(layers, targets, "method.targets") if name in fit]
    else:
        inner = [n for n, m in layers.items() if isinstance(m, nn.MultiheadAttention)]
        free = [name for name in fit if not inside(name, inner)]
        chosen = [name for name in free if block_of(name)] or free
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has no linear layer or convolution that could get an adapter; "
            "name some in method.targets"
        )
    blocks: dict[str, list[str]] = {}
    for name in chosen:
        blocks.setdefault(block_of(name), []).append(name)
    return Places(tuple(map(tuple, blocks.values())), heads)


def block_of(name: str) -> str:
    """Return the path of a layer up to its first number, which is that of its block; "": none."""
    found = re.match(r"(?:[^.\d][^.]*\.)*\d+(?=\.|$)", name)
    return found[0] if found else ""


def _adaptable(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1
    return isinstance(layer, nn.Linear) or _turned(layer)


def _turned(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's kind of linear layer, whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D"


def as_change(layer: nn.Module) -> Tensor:
    """Return the weight of a layer as (outputs, inputs), as a view of it."""
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    return weight.T if _turned(layer) else weight.flatten(1)


def _ends(name: str, endings: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def inside(name: str, paths: Iterable[str]) -> bool:
    """Return whether a name is one of these paths, or below one."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def _named(layers: Mapping[str, nn.Module], wanted: Sequence[str], option: str) -> list[str]:
    for each in wanted:
        if not any(_ends(name, [each]) for name in layers):
            words = {name.rpartition(".")[2] for name in layers}
            raise ConfigError(f"{option} names {each!r}, which no layer is; {nearest(each, words)}")
    return [name for name in layers if _ends(name, wanted)]


def inject(
    model: nn.Module, places: Places, submodel: Rank, *, scale: float, dropout: float
) -> nn.Module:
    """Put adapters into a model, in place; they learn, beside what learns in it already."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ModelError("adapters need peft; pip install 'sizewise[lora]'") from None
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    targets = places.targets(submodel.depth)
    turned = all(_turned(model.get_submodule(name)) for name in targets)
    config = LoraConfig(
        r=submodel.rank,
        lora_alpha=scale * submodel.rank,  # type: ignore[arg-type]
        lora_dropout=dropout,
        fan_in_fan_out=turned,
        # An expression that fits these names and no others; a list would be compared by endings.
        target_modules="|".join(map(re.escape, targets)),
    )
    # Beside weights without data, adapters would be drawn only to be dropped.
    hollow = any(parameter.is_meta for parameter in model.parameters())
    model = inject_adapter_in_model(config, model, low_cpu_mem_usage=hollow)
    for name in learned:
        model.get_parameter(name).requires_grad_(True)
    return model


def start(seed: int, name: str, shape: Sequence[int], draw: int = 0) -> Tensor:
    """Return an A as it is drawn, by its name and the seed: as `nn.Linear` draws its weight.

    Args:
        seed: The run's.
        name: That of the tensor.
        shape: Its shape, (r, inputs, ...).
        draw: Which of several independent draws.
    """
    generator = rng.torch_generator(seed, "adapter", name, *([draw] if draw else []))
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def pairs(tensors: Tensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the adapters among named tensors: the name of the layer, A and B."""
    for name in tensors:
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            yield layer, tensors[name], tensors[layer + UP]


def product(down: Tensor, up: Tensor) -> Tensor:
    """Return B A, (outputs, inputs), of A (r, inputs, ...) and B (outputs, r, ...)."""
    return up.flatten(1) @ down.flatten(1)


def adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
