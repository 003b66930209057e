"""m-FeDepth: FeDepth whose runs of blocks have heads of their own.

The second method of Zhang, Dai, Wang, Xing, Chen, Sun: "Memory-adaptive Depth-wise Heterogeneous
Federated Learning" (https://arxiv.org/abs/2303.04887). It is `fedepth` with `heads = "auxiliary"`:
norm, ReLU, pooling and a linear layer at the width of the block that they follow. They live on the
server, which averages each over the devices that trained it; the public code divides by all sampled
devices instead, so that its heads shrink and vanish by the luck of the draw. The last run uses the
model's own head, and only that one is deployed.

Discloses: the trained weights of each device, to the server.
"""

from dataclasses import dataclass
from typing import Literal

from sizewise.methods.fedepth import FeDepth


class MFeDepth(FeDepth):
    """FeDepth with auxiliary heads."""

    @dataclass(frozen=True)
    class Options(FeDepth.Options):
        """Options of FeDepth, with another default."""

        heads: Literal["skip", "auxiliary"] = "auxiliary"
