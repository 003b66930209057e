"""Small model: everybody trains one narrow network that the weakest device can hold.

The baseline of SLT ("small model") and FeDepth ("FedAvg (x r)"), and the first thing to try: nobody
is left out, and nobody gets a large model.

    width:     the largest multiple of 1/16 whose training step fits the smallest budget
    server:    w <- sum n_k w_k / sum n_k

The network is built narrow and has its own initialisation; it is not cut from a large one. A model
whose factory takes no `width` is cut, and its layers initialised again. Budgets too small for even
one sixteenth are passed over; such devices are refused.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sizewise.common.widths import named
from sizewise.errors import BudgetTooSmall, ConfigError, NoChannelLeft
from sizewise.exchange.plan import Submodel
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.families.widthwise import STEPS
from sizewise.memory.packing import largest_ratio


class Small(Method):
    """FedAvg at the width of the weakest device."""

    @dataclass(frozen=True)
    class Options:
        """Options of the small model.

        Attributes:
            width: Its ratio of channels; default: what the smallest budget holds.
        """

        width: float | None = None

        def __post_init__(self) -> None:
            if self.width is not None and not 0 < self.width <= 1:
                raise ConfigError(f"method.width must be in (0, 1], not {self.width}")

    @cached_property
    def main(self) -> Submodel:
        """The piece that every device trains."""
        return _piece(self.options.width or self._fitting())

    def _fitting(self) -> float:
        """Return the width that the smallest budget holds."""
        (stage,) = self.stages(0)
        ratios = [step / STEPS for step in range(1, STEPS + 1)]
        while not self._exists(ratios[0]):
            ratios.pop(0)
        for memory in self.task.budgets:
            if memory is None:
                return 1.0
            try:
                return largest_ratio(
                    lambda ratio: self.footprint(_piece(ratio), stage).peak, memory, ratios
                )
            except BudgetTooSmall:
                continue
        return ratios[0]

    def _exists(self, width: float) -> bool:
        """Return whether the model can be built so narrow: some would lose a layer's channels."""
        try:
            self.module(_piece(width))
        except NoChannelLeft:
            return False
        return True

    def setup(self) -> State:
        """Return the narrow model's state, and its width: workers need not look for it again."""
        state = super().setup()
        return replace(state, extras={**state.extras, "width": self.main.cut.get("width", 1.0)})

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return the narrow model."""
        return (_piece(state.extras["width"]),)


def _piece(width: float) -> Submodel:
    return Submodel() if width == 1 else Submodel(f"width {named(width)}", {"width": width})
