"""The papers' own accountings of training memory, to reproduce their tables and budgets.

Both add up the outputs of a network's layers, whether or not these are alive at the same time, so
neither is what a device needs; for that, see `memory.predict`.

* `summary` is FeDepth's Table 1 (Zhang et al.: "Memory-adaptive Depth-wise Heterogeneous Federated
  Learning", https://arxiv.org/abs/2303.04887): every layer's output and every block's output, twice
  (once for its gradient), and the parameters once. Not counted are activation functions, the norm
  before the classifier, and, in the figure of a single block, the weights of its projection: only
  so do all its figures come out (with them, block 4 would be 14.06, not 14.05; without them, the
  whole would be 116.03, not 116.04). The paper's MB are 2^20 bytes, and its batch size is 32.
* `hooks` is that of SLT (Pfeiffer, Khalili, Henkel: "Aggregating Capacity in FL through Successive
  Layer Training for Computationally-Constrained Devices", https://arxiv.org/abs/2305.17005): the
  output gradient of every layer that takes part in the backward pass, all parameters, and those
  that learn once more. Layers are what its public code writes as modules: also sums,
  concatenations, the flattening before the classifier, and shortcuts, even those that only hand a
  tensor on. So do the budgets of its ResNet-20 come out: 0.0120, 0.0242 and 0.0486 GB.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from sizewise.memory.prediction import learning_names
from sizewise.surgery.anatomy import Anatomy, anatomy
from sizewise.torch_tools.dry_run import MetaMode

# By the name of the function that computes them, so that layers written as modules and layers
# written as function calls count alike.
_CLASSIFIER = frozenset({"linear"})
_LAYERS = frozenset(
    {"conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "group_norm", "embedding"}
    | _CLASSIFIER
)
_SUMS = frozenset({"add", "add_"})
_OPERATIONS = (
    _LAYERS
    | _SUMS
    | {"relu", "gelu", "cat", "concat", "flatten"}
    | {"avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"}
)


@dataclass(frozen=True)
class Summary:
    """A model's bytes by the accounting of FeDepth's Table 1.

    Attributes:
        stem: The stem.
        blocks: Each block, in order, without the weights of its projection.
        projections: Those weights.
        head: The head.
    """

    stem: int
    blocks: tuple[int, ...]
    projections: int
    head: int

    @property
    def total(self) -> int:
        """The whole model."""
        return self.stem + sum(self.blocks) + self.projections + self.head

    def stage(self, start: int, stop: int) -> int:
        """Return the bytes of training blocks start, ..., stop - 1: what `pack_blocks` asks for."""
        return sum(self.blocks[start:stop])


def summary(model: nn.Module, inputs: Tensor, parts: Anatomy | None = None) -> Summary:
    """Account for a model in three parts as FeDepth's Table 1 does; it is not touched.

    Of the inputs, a batch such as (32, 3, 32, 32), only shape and type matter.
    """
    parts = (anatomy(model) if parts is None else parts).in_turn("the paper's accounting")
    model = copy.deepcopy(model).to("meta")
    x = inputs.to("meta")
    stem, x = _part(model, parts.stem, x, _LAYERS)
    blocks, projections = [], 0
    for path in parts.blocks:
        counted, x = _part(model, (path,), x, _LAYERS)
        named = model.get_submodule(path).named_parameters()
        apart = sum(_bytes(p) for name, p in named if "projection" in name.split("."))
        blocks.append(counted + 2 * _bytes(x) - apart)
        projections += apart
    head, _ = _part(model, parts.head, x, _CLASSIFIER)
    return Summary(stem, tuple(blocks), projections, head)


def _part(
    model: nn.Module, paths: Sequence[str], x: Tensor, names: frozenset[str]
) -> tuple[int, Tensor]:
    """Run some modules; return their layers' outputs twice and their parameters once, in bytes."""
    modules = [model.get_submodule(path) for path in paths]
    with MetaMode(), _Outputs(names) as outputs:
        for module in modules:
            x = module(x)
    weights = sum(_bytes(parameter) for module in modules for parameter in module.parameters())
    return 2 * sum(map(_bytes, outputs.seen)) + weights, x


def hooks(module: nn.Module, inputs: Tensor, trainable: Collection[str] | None = None) -> int:
    """Return the bytes of training a model, as SLT accounts for them; it is not touched.

    Inputs are as for `summary`; `trainable` are prefixes of the names of the parameters that learn,
    by default those that do now.
    """
    learning = learning_names(module, trainable)
    module = copy.deepcopy(module).to("meta")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in learning)
    with MetaMode(), _OutputsAndShortcuts(_OPERATIONS) as outputs:
        module(inputs.to("meta"))
    activations = sum(_bytes(tensor) for tensor in outputs.seen if tensor.requires_grad)
    loaded = sum(map(_bytes, module.parameters()))
    return activations + loaded + sum(_bytes(p) for p in module.parameters() if p.requires_grad)


class _Outputs(TorchFunctionMode):
    """Collects the outputs of the functions with the given names."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names
        self.seen: list[Tensor] = []

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (name := getattr(func, "__name__", "")) in self.names:
            self.see(name, args, out)
        return out

    def see(self, name: str, args: Sequence[Any], out: Tensor) -> None:
        """Take in what a function made of its arguments."""
        self.seen.append(out)


class _OutputsAndShortcuts(_Outputs):
    """Also collects the terms of sums that are handed on: something else has read them before."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        # By their storages, as a term may be cut to fewer channels; held, as numbers are reused.
        self._read: dict[int, Tensor] = {}

    @override
    def see(self, name: str, args: Sequence[Any], out: Tensor) -> None:
        super().see(name, args, out)
        given = {_storage(tensor): tensor for tensor in args if isinstance(tensor, Tensor)}
        if name in _SUMS:
            self.seen += [given[number] for number in given.keys() & self._read.keys()]
        self._read |= given
        self._read.pop(_storage(out), None)  # Changed in place, it is another tensor.


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
