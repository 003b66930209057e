"""How much of a model becomes smaller with the width, in words: a user has to know what does not.

Without torch: reports read it from run folders.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from sizewise.common.structure import build

FILE = "cuts.json"
"""Where a run folder keeps it; there is none if the method cuts nothing."""

SHOWN = 3
"""How many of the parts that stay whole a sentence names."""


@dataclass(frozen=True)
class Cuts:
    """What cutting by width does to a model.

    Attributes:
        share: The share of its parameters, 0 to 1, that shrink with the width.
        whole: What could have been cut but stays whole, and why; a clause each.
    """

    share: float
    whole: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as a sentence, with the first few of what stays whole."""
        if not self.share:
            said = "nothing in this model shrinks with the width: a piece of any width is all of it"
        elif self.share < 0.01:
            said = "less than 1 % of the parameters shrink with the width"
        else:
            # Rounded down: 100 % would say that there is nothing else, not even a last bias.
            said = f"{math.floor(self.share * 100)} % of the parameters shrink with the width"
        if not self.whole:
            return said
        more = len(self.whole) - SHOWN
        named = [*self.whole[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
        return f"{said}; whole: {'; '.join(named)}"


def read(folder: Path) -> Cuts | None:
    """Return what a run folder says; None if the method cuts nothing, or the folder is older."""
    path = folder / FILE
    return build(Cuts, json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
