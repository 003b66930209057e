"""AllSmall: every device trains the first blocks of the model that the weakest device holds.

A baseline of Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No One Left Behind: Inclusive Federated Learning
over Heterogeneous Devices", KDD 2022 (https://arxiv.org/abs/2202.08036). It is the small model for
those who start from a pre-trained one: a model that is shallow keeps its lower blocks as they were
trained, which one that is narrow does not.

    depth:     the largest that fits the smallest budget; blocks behind it do not exist
    server:    w <- sum n_k w_k / sum n_k

Depths are those of InclusiveFL: the model's stages, or `exits`. A depth ends with a head of its
own. Budgets too small for any depth are passed over; such devices are refused.

Discloses: the trained weights of each device, to the server.
"""

from functools import cached_property

from sizewise.families.prefixwise import Depth, Prefixwise
from sizewise.fleet.devices import Device


class AllSmall(Prefixwise):
    """FedAvg at the depth of the weakest device."""

    @cached_property
    def main(self) -> Depth:
        """The submodel that every device trains."""
        return self.trainee(self._least)

    @cached_property
    def _least(self) -> int:
        """The depth that every device trains: found once, as each budget of the fleet is asked."""
        return self.depths()[0]

    def depth(self, device: Device) -> int:
        """Return the depth that every device trains."""
        return self._least

    def depths(self) -> list[int]:
        """Return the smallest of the depths that devices of the fleet could train."""
        return super().depths()[:1]
