"""InclusiveFL: models of several depths; the small ones learn from the updates of the large ones.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No One Left Behind: Inclusive Federated Learning over
Heterogeneous Devices", KDD 2022 (https://arxiv.org/abs/2202.08036).

    size j:    the first L_j blocks and a head of its own, L_1 < L_2 < ...
    device:    trains the size that it holds
    server:    g_j <- mean update of the devices of size j, for each j
               g_j[last block] <- beta m_{j+1} + (1 - beta) g_j[last block]       (distillation)
               w_j <- server optimiser of size j, applied to g_j
               m_j <- mean over blocks L_{j-1}..L_j of the update of size j
               blocks before the last, of all sizes that have them: mean, by the data behind them

The last block of a size and its head are its own; the stem and the blocks before are shared. m is
that of the last round in which the next larger size was trained; 0 at first. `sharing = false` and
`beta = 0` are the paper's ablations. Where blocks differ, as in a CNN, the mean for each parameter
is over those that have it in the same shape.

The public code never applies its distillation (three bugs: docs/methods/inclusivefl.md). There,
gradients of all devices are taken at the same weights; that is `recipe.max_steps = 1`.

Sizes are depths of any model with blocks, found from bytes; `exits` names them by their number of
blocks. Heads of feature maps are those of `exits`; of tokens, copies of the model's own.

Discloses: the trained weights of each device, to the server.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange import server_optimizers
from sizewise.exchange.kept_apart import own_name, shared_name
from sizewise.exchange.merging import Merging
from sizewise.exchange.plan import Submodel, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, TensorSlice, View
from sizewise.families.prefixwise import Depth, Depths, DepthSubmodels, Prefixwise
from sizewise.surgery import norms
from sizewise.training.task import Task


class Sharing(DepthSubmodels):
    """Depths whose last block is their own, the whole model's excepted; or all that they have."""

    def __init__(self, task: Task, sharing: bool) -> None:
        super().__init__(task)
        self.sharing = sharing

    def slices(self, submodel: Depth) -> View:
        """Return where a size's tensors live."""
        found, blocks = super().slices(submodel), self.task.parts.blocks
        if submodel.blocks == len(blocks) or (self.sharing and not submodel.blocks):
            return found
        own = f"{blocks[submodel.blocks - 1]}." if self.sharing else ""
        return {
            local: TensorSlice(own_name(place.name, submodel.label))
            # Exits are named after their depth already.
            if place.name.startswith(own) and not place.name.startswith("exits.")
            else place
            for local, place in found.items()
        }


class InclusiveFL(Prefixwise):
    """Depths with shared lower blocks and momentum distillation."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"server": "fedadam", "server_lr": 0.01}

    @dataclass(frozen=True)
    class Options(Prefixwise.Options):
        """Options of InclusiveFL.

        Attributes:
            beta: How much the last block of a size takes from the next larger one; 0: nothing.
            sharing: Whether sizes share their stem and lower blocks.
            server_lrs: The server's step size for each size, smallest first; default: the recipe's.
        """

        beta: float = 0.2
        sharing: bool = True
        server_lrs: tuple[float, ...] = ()

        def __post_init__(self) -> None:
            if not 0 <= self.beta <= 1:
                raise ConfigError(f"method.beta must be in [0, 1], not {self.beta}")
            if not all(0 < lr < math.inf for lr in self.server_lrs):
                raise ConfigError("method.server_lrs must all be positive numbers")

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        norms.refuse_apart(task.recipe.norm, "inclusivefl")

    # ---- what is shared

    @cached_property
    def submodels(self) -> "Sharing":
        """Depths that share their lower blocks."""
        return Sharing(self.task, self.options.sharing)

    def trainee(self, depth: int) -> Depth:
        """Return the size of a depth: its blocks and its head."""
        return replace(self.single(depth), label=f"depth {depth}")

    def setup(self) -> State:
        """Return the whole model, and the blocks and heads that sizes have of their own."""
        state = super().setup()
        depths = state.facts(Depths).depths
        if self.options.server_lrs and len(self.options.server_lrs) != len(depths):
            raise ConfigError(
                f"method.server_lrs needs one number for each of the {len(depths)} sizes that "
                f"devices train, not {len(self.options.server_lrs)}"
            )
        # All sizes begin with the same blocks, pre-trained or not.
        tensors = {name: state.tensors[shared_name(name)].clone() for name in state.tensors}
        return replace(state, tensors=tensors)

    # ---- the server, after a round

    def unclipped(self) -> str:
        """Return that sizes count by who came."""
        return "its server weighs sizes by the devices that came; use another method"

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state: a step for each size, then a mean over the sizes."""
        means: dict[Submodel, Merging] = {}
        weights: dict[Submodel, float] = defaultdict(float)
        for update in updates:
            size, weight = update.plan.submodel, self.task.weight(update)
            mean = means.setdefault(size, self.merging(state))
            mean.add(update.tensors, self.submodels.view(size), weight)
            weights[size] += weight
        sizes, server_state = self.sizes(state), dict(state.server_state)
        proposed: dict[str, list[tuple[Tensor, float]]] = defaultdict(list)
        for number, size in enumerate(sizes):
            if size in means:
                merged = means.pop(size).result()
                tensors, remembered = self._stepped(state, sizes, number, merged)
                server_state |= remembered
                for name, tensor in tensors.items():
                    proposed[name].append((tensor, weights[size]))
        agreed = {name: _mean(state.tensors[name], found) for name, found in proposed.items()}
        tensors = {**state.tensors, **agreed}
        return replace(state, tensors=tensors, server_state=server_state)

    def _stepped(
        self, state: State, sizes: Sequence[Depth], number: int, merged: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of one size after the server's step, and what it remembers."""
        size, view = sizes[number], self.submodels.view(sizes[number])
        old = {place.name: state.tensors[place.name] for place in view.values()}
        new = {name: merged[name] for name in old}
        learned = [view[name].name for name in self._learning(size)]
        steps = {name: new[name] - old[name] for name in learned}
        recipe, beta, taught = self.task.recipe, self.options.beta, {}
        if number:
            named = [self._block(size, block) for block in range(size.blocks)]
            for key, blocks in self._taught(sizes[number - 1], size).items():
                layers = [steps[named[block][key]] for block in blocks]
                taught[f"momentum/{size.label}/{key}"] = torch.stack(layers).mean(dim=0)
        if beta and number + 1 < len(sizes):
            larger, last = sizes[number + 1], self._block(size, size.blocks - 1)
            for key in self._taught(size, larger):
                name = last[key]
                momentum = state.server_state.get(f"momentum/{larger.label}/{key}", 0.0)
                new[name] = old[name] + beta * momentum + (1 - beta) * steps[name]
        if self.options.server_lrs:
            recipe = replace(recipe, server_lr=self.options.server_lrs[number])
        own, everybody = f"server/{size.label}/", dict.fromkeys(learned, True)
        kept = state.server_state.items()
        before = {k.removeprefix(own): t for k, t in kept if k.startswith(own)}
        tensors, moments = server_optimizers.apply(recipe, old, new, before, everybody)
        return tensors, taught | {own + key: moment for key, moment in moments.items()}

    def _learning(self, size: Depth) -> dict[str, torch.Size]:
        """Return the shapes of a size's parameters, without those that their owner froze."""
        named = self.submodels.pattern(size).named_parameters()
        return {name: p.shape for name, p in named if p.requires_grad}

    def _block(self, size: Depth, number: int) -> dict[str, str]:
        """Return the server's names of what learns in a block, by the names within the block."""
        view, prefix = self.submodels.view(size), f"model.{self.task.parts.blocks[number]}."
        names = self._learning(size)
        return {n.removeprefix(prefix): view[n].name for n in names if n.startswith(prefix)}

    def _taught(self, smaller: Depth, larger: Depth) -> dict[str, list[int]]:
        """Return, by its name within a block, who teaches each parameter of a size's last block.

        These are the blocks of the next larger size, from that block on, that have it in the same
        shape.
        """
        if not smaller.blocks:
            return {}  # It has no block at all.
        last, shapes, paths = smaller.blocks - 1, self._learning(larger), self.task.parts.blocks
        taught: dict[str, list[int]] = {}
        for key in self._block(smaller, last).keys() & self._block(larger, last).keys():
            names = {n: f"model.{paths[n]}.{key}" for n in range(last, larger.blocks)}
            own = shapes[names[last]]
            taught[key] = [n for n, name in names.items() if shapes.get(name) == own]
        return dict(sorted(taught.items()))


def _mean(old: Tensor, found: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the weighted mean of one tensor of several sizes; of counters, the furthest.

    What no size changed is the old tensor itself: the mean of equal numbers would be rounded.
    """
    if all(torch.equal(tensor, old) for tensor, _ in found):
        return old
    if len(found) == 1:
        return found[0][0]
    tensors = torch.stack([tensor for tensor, _ in found])
    if not tensors.is_floating_point():
        return tensors.amax(dim=0)
    shares = tensors.new_tensor([weight for _, weight in found])
    mean: Tensor = torch.tensordot(shares / shares.sum(), tensors, dims=1)
    return mean
