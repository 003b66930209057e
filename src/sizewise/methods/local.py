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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, Submodel, Update
from sizewise.exchange.state import State
from sizewise.exchange.traffic import Traffic
from sizewise.exchange.view import Tensors, cut
from sizewise.families.base import Method
from sizewise.families.options import acts_only
from sizewise.families.own_models import Holdings, OwnModels
from sizewise.families.prefixwise import Prefixwise
from sizewise.families.submodels import Submodels
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.training.loop import Shard
from sizewise.training.task import Task


class Local(OwnModels):
    """Training without a federation."""

    discloses = frozenset[str]()

    @dataclass(frozen=True)
    class Options(FedAvg.Options):
        """Options of training alone.

        Attributes:
            sizes: Whether all devices have one model, or each the depth or width that it can hold.
            exits: With depths, the number of blocks of each, as for depthfl.
        """

        sizes: Literal["one", "depth", "width"] = "one"
        exits: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            super().__post_init__()
            acts_only(self, "width", "method.sizes = 'one'", self.sizes == "one")
            acts_only(self, "exits", "method.sizes = 'depth'", self.sizes == "depth")

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if self.options.sizes == "depth" and task.recipe.eval_memory is not None:
            raise ConfigError(
                "local with method.sizes = 'depth' runs exits of its own, which "
                "recipe.eval_memory cannot; leave it out"
            )
        self.submodel_type = self.family.submodel_type

    # ---- the sizes, those of methods that exchange what devices train

    @cached_property
    def family(self) -> Method:
        """The method whose submodels devices have."""
        if self.options.sizes == "depth":
            return Prefixwise(self.task, Prefixwise.Options(exits=self.options.exits))
        if self.options.sizes == "width":
            return Widthwise(self.task)
        return FedAvg(self.task, self.options)

    @cached_property
    def submodels(self) -> Submodels:
        """Those of the family."""
        return self.family.submodels

    @cached_property
    def main(self) -> Submodel:
        """The largest submodel that the server has the start of."""
        return self.family.main

    def trained(self) -> Sequence[Submodel]:
        """Return the sizes that devices train, smallest first."""
        return self.family.trained()

    def setup(self) -> State:
        """Return the common start of all sizes."""
        return self.family.setup().noting(Holdings({}))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the one model, or the size that fits."""
        return self.family.plan(state, device, round_index)

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return the sizes, smallest first."""
        return self.family.sizes(state)

    # ---- the device

    def traffic(self, plan: Plan, samples: int) -> Traffic:
        """Nothing is sent."""
        return Traffic(returns=False)

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train on from the device's own model, if it has one of this size; send nothing."""
        own = {name: tensor.shape for name, tensor in tensors.items()}
        if any(own.get(name) != tensor.shape for name, tensor in device_state.items()):
            device_state = {}
        update = super().train(plan, {**tensors, **device_state}, shard, {})
        return replace(update, tensors={}, device_state=update.tensors)

    # ---- what people run

    def own_model(self, state: State, submodel: Any, device_state: Tensors) -> nn.Module:
        """Return a device's model; at first, the common start."""
        common = cut(state.tensors, self.submodels.view(submodel))
        return self.submodels.copy(submodel).load({**common, **device_state})

    def name_of(self, number: int, submodel: Submodel) -> str:
        """Return what people call a device's model; where all have one size, without it."""
        alike = self.options.sizes == "one"
        return f"device {number}" if alike else super().name_of(number, submodel)
