"""Local: every device trains alone; nothing is exchanged.

The lower bound of InclusiveFL's Table 3 and of every comparison: what a device gets from its own
data. All devices start from the same weights. A device's model is its memory: it stays with the
device from round to round, and the server's tensors never change.

    device k:  w_k <- E epochs of SGD on its own data, starting from its own w_k

All devices have one model, as wide as `width` says; or each has the size that fits its bytes: as
many of the first blocks as InclusiveFL gives it (`sizes = "depth"`, that paper's baseline), or the
first channels of every layer, as HeteroFL does (`"width"`). A device that gets another size than
before starts anew.

Evaluated as the mean over the models of all devices that have trained so far.

Discloses: nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from torch import nn

from sizewise.errors import ConfigError
from sizewise.exchange.plan import Submodel, Plan, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, cut
from sizewise.families.base import Method
from sizewise.families.options import acts_only
from sizewise.families.prefixwise import Prefixwise
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.training.loop import Shard
from sizewise.training.task import Task
from sizewise.training.working import WorkingCopy

SIZES = "sizes"
"""Where the state's extras say which piece each device has."""


class Local(Method):
    """Training without a federation."""

    discloses = frozenset[str]()

    @dataclass(frozen=True)
    class Options(FedAvg.Options):
        """Options of training alone.

        Attributes:
            sizes: Whether all devices have one model, or each the depth or width that it can hold.
            exits: With depths, the number of blocks of each; see `Prefixwise.Options`.
        """

        sizes: Literal["one", "depth", "width"] = "one"
        exits: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            super().__post_init__()
            acts_only(self, "width", "method.sizes = 'one'", self.sizes == "one")
            acts_only(self, "exits", "method.sizes = 'depth'", self.sizes == "depth")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if self.options.sizes == "depth" and task.recipe.eval_memory is not None:
            raise ConfigError(
                "local with method.sizes = 'depth' runs exits of its own, which "
                "recipe.eval_memory cannot; leave it out"
            )

    # ---- the sizes, those of methods that exchange what devices train

    @cached_property
    def family(self) -> Method:
        """The method whose pieces devices have."""
        if self.options.sizes == "depth":
            return Prefixwise(self.task, Prefixwise.Options(exits=self.options.exits))
        if self.options.sizes == "width":
            return Widthwise(self.task)
        return FedAvg(self.task, self.options)

    @cached_property
    def main(self) -> Submodel:
        """The largest piece that the server has the start of."""
        return self.family.main

    def build(self, piece: Submodel) -> nn.Module:
        """Build a model of a size."""
        return self.family.build(piece)

    def copy(self, piece: Submodel) -> WorkingCopy:
        """Return the working copy of a size, the one that its family has."""
        return self.family.copy(piece)

    def pattern(self, piece: Submodel) -> nn.Module:
        """Return the model that the cost of a size is learned from."""
        return self.family.pattern(piece)

    def view(self, piece: Submodel) -> View:
        """Return where a size's common start is."""
        return self.family.view(piece)

    def setup(self) -> State:
        """Return the common start of all sizes."""
        return self.family.setup()

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the one model, or the size that fits."""
        return self.family.plan(state, device, round_index)

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return the sizes, smallest first."""
        return self.family.pieces(state)

    # ---- the device

    def expected(self, plan: Plan) -> frozenset[str]:
        """Nothing is sent."""
        return frozenset()

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train on from the device's own model, if it has one of this size; send nothing."""
        own = {name: tensor.shape for name, tensor in tensors.items()}
        if any(own.get(name) != tensor.shape for name, tensor in memory.items()):
            memory = {}
        update = self.fit(plan, {**tensors, **memory}, shard)
        return replace(update, tensors={}, memory=update.tensors)

    # ---- the server, after a round

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the same tensors, and who has which size."""
        sizes = dict(state.extras.get(SIZES, {}))

        def noted() -> Iterator[Update]:
            for update in updates:
                piece = update.plan.piece
                sizes[str(update.plan.device)] = {"size": piece.size, "cut": dict(piece.cut)}
                yield update

        merged = super().merge(state, noted())
        return replace(merged, extras={**merged.extras, SIZES: sizes})

    # ---- what people run

    def deploy(self, state: State) -> dict[str, Callable[[], nn.Module]]:
        """Return every device's own model; before any has trained, the common start."""
        if not state.devices:
            return super().deploy(state)
        owners = self.owners(state).items()
        return {size: partial(self._model, state, number) for size, number in owners}

    def owners(self, state: State) -> dict[str, int]:
        """Return whose model each is."""
        several = self.options.sizes != "one"
        return {
            f"device {n} ({self._piece(state, n).size})" if several else f"device {n}": n
            for n in sorted(state.devices)
        }

    def _piece(self, state: State, number: int) -> Submodel:
        known = state.extras.get(SIZES, {}).get(str(number))
        return self.main if known is None else Submodel(known["size"], known["cut"])

    def _model(self, state: State, number: int) -> nn.Module:
        piece = self._piece(state, number)
        common = cut(state.tensors, self.view(piece))
        return self.copy(piece).load({**common, **state.devices[number]})

    def headline(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy over the devices."""
        return sum(sizes.values()) / len(sizes)
