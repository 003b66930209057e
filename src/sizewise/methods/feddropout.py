"""Federated Dropout: each device trains a random subset of the channels.

Caldas, Konecny, McMahan, Talwalkar: "Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements", 2018 (https://arxiv.org/abs/1812.07210); for devices of different width as
in SLT's baseline "FD".

    device k:  a submodel of width m keeps m random channels of every group
    server:    each entry of w <- mean over the devices whose submodel holds it; others stay

Layers along one residual stream share their subset. `subsets` says how many there are: a fresh one
for each device and round; one for all devices of a round; or a pool of them, drawn at the start,
from which each device takes one each round (SLT, Appendix A).

The full model is deployed.

Discloses: the trained weights of each device, to the server.
"""

from dataclasses import dataclass
from typing import Any, Literal

from sizewise.common import rng
from sizewise.cutting import selection
from sizewise.cutting.selection import Rule
from sizewise.errors import ConfigError
from sizewise.families.options import acts_only
from sizewise.families.submodels import Width
from sizewise.families.widthwise import Shifting
from sizewise.fleet.devices import Device


@dataclass(frozen=True)
class Subset(Width):
    """A random subset of the channels: numbers name the draw, none where only shapes matter."""

    draw: tuple[int, ...] = ()

    @property
    def shape_key(self) -> Width:
        """All subsets of a width have the same shapes."""
        return Subset(self.width)


class FedDropout(Shifting):
    """Random subsets of channels."""

    submodel_type: type[Subset] = Subset

    @dataclass(frozen=True)
    class Options(Shifting.Options):
        """Options of Federated Dropout.

        Attributes:
            subsets: Whether subsets are drawn per device and round, per round, or from a pool.
            pool: Size of the pool.
        """

        subsets: Literal["device", "round", "pool"] = "device"
        pool: int = 10

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.pool < 1:
                raise ConfigError(f"method.pool must be at least 1, not {self.pool}")
            acts_only(self, "pool", "method.subsets = 'pool'", self.subsets == "pool")

    options: Options

    def due(self, width: float, device: Device, round_index: int) -> Subset:
        """Return the subset that a device's draw gives."""
        if self.options.subsets == "round":
            return Subset(width, (round_index,))
        if self.options.subsets == "pool":
            generator = rng.python_generator(self.task.seed, "pool", round_index, device.id)
            return Subset(width, (generator.randrange(self.options.pool),))
        return Subset(width, (round_index, device.id))

    def rule(self, submodel: Any) -> Rule:
        """Keep the channels of the submodel's draw."""
        generator = rng.torch_generator(self.task.seed, "channels", *submodel.draw)
        return selection.random(generator)
