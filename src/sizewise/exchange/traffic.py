"""What travels between server and device beside the tensors of its view."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sizewise.errors import UpdateRefused
from sizewise.exchange.view import Tensors, check_sample_payload


@dataclass(frozen=True)
class Traffic:
    """The types and shapes of it, as tensors on the meta device.

    Attributes:
        down: What the server sends beside a device's view, by name.
        up: What a device tells of its samples, by name.
        below: For what is told in whole numbers, such as labels, the first that is too large.
        returns: Whether a device sends back what it trained of its view.
    """

    down: Tensors = field(default_factory=dict)
    up: Tensors = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)
    returns: bool = True

    def check(self, told: Tensors) -> None:
        """Raise UpdateRefused unless a device tells of its samples what it was asked for."""
        check_sample_payload(told, self.up)
        for name, end in self.below.items():
            if not ((told[name] >= 0) & (told[name] < end)).all():
                raise UpdateRefused(f"{name!r} holds numbers outside 0 to {end - 1}")
