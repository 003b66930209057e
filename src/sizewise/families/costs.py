"""What a training step of a submodel takes, predicted once for each kind of step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from sizewise.exchange.plan import Submodel, TrainingStage, Work
from sizewise.families.submodels import Submodels
from sizewise.memory import prediction
from sizewise.memory.prediction import Cost
from sizewise.steps.levers import Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.step import Loss
from sizewise.training import loop
from sizewise.training.task import Task

Key = tuple[Submodel, tuple[str, ...] | None, Work, Levers]


class Costs:
    """Predicted costs of the steps of one method.

    Args:
        task: What is trained, and how.
        submodels: The models.
        loss: From a submodel and a stage to what is minimised, the costliest if losses differ.
        example: From a submodel, a stage and a number of samples to inputs and targets, of which
            only the shapes matter.
    """

    def __init__(
        self,
        task: Task,
        submodels: Submodels,
        loss: Callable[[Any, TrainingStage], Loss],
        example: Callable[[Any, TrainingStage, int], tuple[Any, Any]],
    ) -> None:
        self.task, self.submodels = task, submodels
        self._loss, self._example = loss, example
        self._known: dict[Key, Cost] = {}
        self._resident: dict[Submodel, int] = {}

    def step(self, submodel: Submodel, stage: TrainingStage) -> Cost:
        """Return what one step of a stage is predicted to take."""
        key = submodel.shape_key, stage.trainable, stage.work, stage.levers
        if key not in self._known:
            actual = self.submodels.copy(submodel).actual(stage)
            self._known[key] = self.of(self.submodels.pattern(submodel), submodel, actual)
        return self._known[key]

    def resident(self, submodel: Submodel) -> int:
        """Return the bytes of a submodel's own tensors."""
        key = submodel.shape_key
        if key not in self._resident:
            device = torch.device(self.task.predicted_for)
            pattern = self.submodels.pattern(submodel)
            self._resident[key] = prediction.resident(pattern, device)
        return self._resident[key]

    def of(self, module: nn.Module, submodel: Submodel, stage: TrainingStage) -> Cost:
        """Return what one step of a stage takes on a model that is not kept, such as a sketch."""
        recipe, device = self.task.recipe, torch.device(self.task.predicted_for)
        return prediction.cost(
            module,
            *self._example(submodel, stage, recipe.batch),
            step=loop.make_step(recipe, self._loss(submodel, stage), stage.levers, device),
            anchored=recipe.proximal > 0,
            optimizer=partial(make_optimizer, recipe, lr=stage.lr, levers=stage.levers),
            trainable=stage.trainable,
            device=device,
        )
