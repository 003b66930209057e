"""FedRolex: HeteroFL with a window of channels that rolls on every round.

Alam, Liu, Yan, Zhang: "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022 (https://arxiv.org/abs/2212.01548).

    round t:   a submodel of width m keeps the channels (t + i) mod W, i < m, of every layer
    server:    each entry of w <- mean over the devices whose submodel holds it; others stay

So the server's model can be larger than any device's, and all of it is trained in turn. Not quite
all: layers of equal width roll in lockstep, and weights between channels that are never in one
window stay as they were drawn, half of PreResNet-20's at a quarter width. `stride = "group"` gives
each group of channels a stride of its own, which reaches them all.

The full model is deployed.

Discloses: the trained weights of each device, to the server.
"""

from dataclasses import dataclass
from typing import Any, Literal

from sizewise.cutting import selection
from sizewise.cutting.selection import Rule
from sizewise.families.submodels import Width
from sizewise.families.widthwise import Shifting
from sizewise.fleet.devices import Device


@dataclass(frozen=True)
class Window(Width):
    """A window of channels: the round says where it begins, None where only shapes matter."""

    round: int | None = None

    @property
    def shape_key(self) -> Width:
        """All windows of a width have the same shapes."""
        return Window(self.width)


class FedRolex(Shifting):
    """Rolling windows of channels."""

    submodel_type: type[Window] = Window

    @dataclass(frozen=True)
    class Options(Shifting.Options):
        """Options of FedRolex.

        Attributes:
            stride: Whether all groups of channels roll by one each round, as published, or each by
                a stride of its own.
        """

        stride: Literal["common", "group"] = "common"

    options: Options

    def due(self, width: float, device: Device, round_index: int) -> Window:
        """Return the round's window: all devices of a width see the same one."""
        return Window(width, round_index)

    def rule(self, submodel: Any) -> Rule:
        """Keep the window of the submodel's round; the first one where only shapes matter."""
        return selection.rolling(submodel.round or 0, self.options.stride)
