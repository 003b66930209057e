"""What adapters are like: the options of all methods that have some."""

from dataclasses import dataclass

from sizewise.errors import ConfigError
from sizewise.families.base import Method
from sizewise.torch_tools.stored import Stored


@dataclass(frozen=True)
class AdapterOptions(Method.Options):
    """Options of all methods with adapters.

    Attributes:
        ranks: The ranks that a device may get.
        depths: In how many of the last blocks a device may have adapters: as many as fit come
            first, then the rank. Default: in all.
        targets: Layers that get an adapter, by name or the end of it, such as "query"; default:
            all linear layers and convolutions of the blocks.
        head: Modules that learn as a whole, by name or the end of it; default: the classifier,
            and nothing where the next token is to be found.
        scale: What an adapter's product is multiplied with: alpha / r of the papers, the same
            for all ranks.
        dropout: Before an adapter.
        base: How the frozen weights are stored.
    """

    ranks: tuple[int, ...] = (1, 2, 4, 8, 16)
    depths: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    head: tuple[str, ...] | None = None
    scale: float = 2.0
    dropout: float = 0.0
    base: Stored = "float32"

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"method.ranks must be whole numbers from 1 on, not {self.ranks}")
        if self.depths and min(self.depths) < 1:
            raise ConfigError(f"method.depths must be numbers of blocks, not {self.depths}")
        if not self.scale > 0:
            raise ConfigError(f"method.scale must be a positive number, not {self.scale}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"method.dropout must be in [0, 1), not {self.dropout}")
