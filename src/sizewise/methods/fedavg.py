"""FedAvg: every device trains the same model, the server takes the mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017.

    device k:  w_k <- E epochs of SGD on its n_k samples, starting from w
    server:    w <- sum_k n_k w_k / sum_k n_k

`width` trains a narrower network instead, on every device: the "FedAvg (x r)" rows of FeDepth and
the small model of SLT. It has its own initialisation; it is not cut from a large one. A device
whose budget does not hold a training step of that network cannot take part.

Discloses: the trained weights of each device, to the server.
"""

from dataclasses import dataclass
from functools import cached_property

from sizewise.errors import ConfigError
from sizewise.families.base import Method
from sizewise.families.submodels import Width


class FedAvg(Method):
    """Federated averaging, at full or reduced width."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of FedAvg.

        Attributes:
            width: Ratio of channels that the network keeps.
        """

        width: float = 1.0

        def __post_init__(self) -> None:
            if not 0 < self.width <= 1:
                raise ConfigError(f"method.width must be in (0, 1], not {self.width}")

    options: Options

    @cached_property
    def main(self) -> Width:
        """The submodel that every device trains."""
        return Width(self.options.width)
