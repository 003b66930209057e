"""Local: every device trains alone; nothing is exchanged.

The lower bound of InclusiveFL's Table 3 and of every comparison: what a device gets from its own
data. All devices start from the same weights. A device's model is its memory: it stays with the
device from round to round, and the server's tensors never change.

    device k:  w_k <- E epochs of SGD on its own data, starting from its own w_k

Evaluated as the mean over the models of all devices that have trained so far.

Discloses: nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from sizewise.methods.fedavg import FedAvg
from sizewise.plan import Plan, Update
from sizewise.state import State
from sizewise.training import Shard
from sizewise.view import Tensors, cut


class Local(FedAvg):
    """Training without a federation."""

    discloses = frozenset[str]()

    def expected(self, plan: Plan) -> frozenset[str]:
        """Nothing is sent."""
        return frozenset()

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train on from the device's own model; send nothing."""
        update = self.fit(plan, {**tensors, **memory}, shard)
        return replace(update, tensors={}, memory=update.tensors)

    def deploy(self, state: State) -> dict[str, Callable[[], nn.Module]]:
        """Return every device's own model; before any has trained, the common start."""
        if not state.devices:
            return super().deploy(state)
        return {size: self._model(state, number) for size, number in self.owners(state).items()}

    def owners(self, state: State) -> dict[str, int]:
        """Return whose model each is."""
        return {f"device {number}": number for number in sorted(state.devices)}

    def _model(self, state: State, number: int) -> Callable[[], nn.Module]:
        common = cut(state.tensors, self.view(self.main))
        return lambda: self.copy(self.main).load({**common, **state.devices[number]})

    def headline(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy over the devices."""
        return sum(sizes.values()) / len(sizes)
