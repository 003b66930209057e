"""FedAdam: FedAvg whose server takes the mean update as a gradient for Adam.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021.

    d = mean_k(w_k) - w;  m <- b1 m + (1-b1) d;  v <- b2 v + (1-b2) d^2
    w <- w + eta m / (sqrt(v) + tau)

The server optimiser is a choice of the recipe (`recipe.server`) and works with every method; this
name only selects it, with a step size of 0.01. The 0.1 that Flower starts from moves each weight by
up to 0.1 in every round, which is too much for networks with batch norm.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from sizewise.methods.fedavg import FedAvg


class FedAdam(FedAvg):
    """FedAvg with an adaptive server optimiser."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"server": "fedadam", "server_lr": 0.01}
