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
from dataclasses import dataclass
from functools import cached_property

from sizewise.errors import ConfigError, NoChannelLeft
from sizewise.exchange.plan import Submodel
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.families.submodels import Width
from sizewise.families.widthwise import STEPS
from sizewise.memory.packing import largest_fitting


class Small(Method):
    """FedAvg at the width of the weakest device."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of the small model.

        Attributes:
            width: Its ratio of channels; default: what the smallest budget holds.
        """

        width: float | None = None

        def __post_init__(self) -> None:
            if self.width is not None and not 0 < self.width <= 1:
                raise ConfigError(f"method.width must be in (0, 1], not {self.width}")

    options: Options

    @cached_property
    def main(self) -> Width:
        """The submodel that every device trains."""
        return Width(self.options.width) if self.options.width else self._fitting()

    def _fitting(self) -> Width:
        """Return the model that the smallest budget holds; if none does, the narrowest."""
        choices = [Width(step / STEPS) for step in range(1, STEPS + 1)]
        while not self._exists(choices[0]):
            choices.pop(0)
        found = (
            largest_fitting(choices, self.levers.least, memory) for memory in self.task.budgets
        )
        return next((width for width in found if width is not None), choices[0])

    def _exists(self, submodel: Width) -> bool:
        """Return whether the model can be built so narrow: some would lose a layer's channels."""
        try:
            self.submodels.module(submodel)
        except NoChannelLeft:
            return False
        return True

    def setup(self) -> State:
        """Return the narrow model's state, and its width: workers need not look for it again."""
        return super().setup().noting(self.main)

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return the narrow model."""
        return (state.facts(Width),)
