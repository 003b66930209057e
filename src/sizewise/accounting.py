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
  that learn once more.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sizewise.anatomy import Staged
from sizewise.memory import learning_names

# By the name of the function that computes them, so that layers written as modules and layers
# written as function calls count alike.
_CLASSIFIER = frozenset({"linear"})
_LAYERS = frozenset(
    {"conv1d", "conv2d", "conv3d", "batch_norm", "layer_norm", "group_norm", "embedding"}
    | _CLASSIFIER
)
_OPERATIONS = _LAYERS | {"relu", "gelu", "add", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"}


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


def summary(model: Staged, inputs: Tensor) -> Summary:
    """Account for a model as FeDepth's Table 1 does.

    Args:
        model: A model of the zoo, or another one in three parts; it is not touched.
        inputs: A batch, e.g. (32, 3, 32, 32); only its shape and type matter.
    """
    model = copy.deepcopy(model).to("meta")
    x = inputs.to("meta")
    parts: list[int] = []
    projections = 0
    for part in (model.stem, *model.blocks, model.head):
        with _Outputs(_CLASSIFIER if part is model.head else _LAYERS) as outputs:
            x = part(x)
        counted = outputs.seen if part in (model.stem, model.head) else [*outputs.seen, x]
        parts.append(2 * sum(map(_bytes, counted)) + sum(map(_bytes, part.parameters())))
        for name, parameter in part.named_parameters():
            if "projection" in name.split("."):
                parts[-1] -= _bytes(parameter)
                projections += _bytes(parameter)
    return Summary(parts[0], tuple(parts[1:-1]), projections, parts[-1])


def hooks(module: nn.Module, inputs: Tensor, trainable: Collection[str] | None = None) -> int:
    """Return the bytes of training a model, as SLT accounts for them.

    Args:
        module: Any model; it is not touched.
        inputs: A batch, e.g. (32, 3, 32, 32); only its shape and type matter.
        trainable: Prefixes of the names of the parameters that learn; default: those that do now.
    """
    learning = learning_names(module, trainable)
    module = copy.deepcopy(module).to("meta")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in learning)
    with _Outputs(_OPERATIONS) as outputs:
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
        if getattr(func, "__name__", "") in self.names:
            self.seen.append(out)
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
