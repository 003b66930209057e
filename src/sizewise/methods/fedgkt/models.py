"""FedGKT's two models, and what a stage of a device does."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from sizewise.exchange.plan import Submodel, Work
from sizewise.exchange.view import View, whole
from sizewise.families.submodels import Submodels
from sizewise.surgery.anatomy import Staged
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task


@dataclass(frozen=True)
class Side(Submodel):
    """The devices' model, by its name; without one, the server's part of the large one."""

    client: str | None = None

    @property
    def label(self) -> str:
        """What people call it."""
        return self.client or "server"


@dataclass(frozen=True)
class Taught(Work):
    """A device's training, with the server's logits if it is taught."""

    taught: bool = False

    @property
    def label(self) -> str:
        """What people call it."""
        return "distil" if self.taught else "local"


class Sides(Submodels):
    """The devices' small model, and the large one without its stem; each with a task of its own."""

    def __init__(self, task: Task, small: Task) -> None:
        super().__init__(task)
        self.small = small

    def build(self, submodel: Any) -> nn.Module:
        """Build the small model, or the large one without its stem."""
        if submodel.client:
            return self.small.build()
        model, parts = self.task.build(), self.task.parts.in_turn("fedgkt")
        blocks = [model.get_submodule(path) for path in parts.blocks]
        head = nn.Sequential(*(model.get_submodule(path) for path in parts.head))
        return Staged(nn.Identity(), blocks, head)

    def slices(self, submodel: Any) -> View:
        """Return the server's tensors for the server; devices see none of them."""
        return whole({} if submodel.client else own_tensors(self.pattern(submodel)))
