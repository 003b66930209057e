"""FedRolex: HeteroFL with a window of channels that rolls on every round.

Alam, Liu, Yan, Zhang: "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022 (https://arxiv.org/abs/2212.01548).

    round t:   a piece of width m keeps the channels (t + i) mod W, i < m, of every layer
    server:    each entry of w <- mean over the devices whose piece holds it; others stay

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
from sizewise.exchange.plan import Submodel
from sizewise.families.widthwise import Shifting
from sizewise.fleet.devices import Device


class FedRolex(Shifting):
    """Rolling windows of channels."""

    @dataclass(frozen=True)
    class Options(Shifting.Options):
        """Options of FedRolex.

        Attributes:
            stride: Whether all groups of channels roll by one each round, as published, or each by
                a stride of its own.
        """

        stride: Literal["common", "group"] = "common"

    def due(self, device: Device, round_index: int) -> dict[str, Any]:
        """Return the round: all devices see the same window."""
        return {"round": round_index}

    def rule(self, piece: Submodel) -> Rule:
        """Keep the window of the piece's round; the first one where only shapes matter."""
        return selection.rolling(piece.cut.get("round", 0), self.options.stride)
