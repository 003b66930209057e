"""FedProx: FedAvg whose devices stay near what they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020.

    device k minimises  loss_k(v) + mu/2 ||v - w||^2   over the tensors that it trains

The proximal term is a choice of the recipe (`recipe.proximal`) and works with every method; this
name only sets mu to 0.01.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from sizewise.methods.fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"proximal": 0.01}
