"""The devices' optimisers: torch's own update rules, without the classes around them.

A device mostly gets a fresh optimiser in every round, and takes few steps with it.
`torch.optim.SGD` costs more than such a step of a small model: hooks, groups, a profiler's record,
and at its first use an import of torch's compiler, which takes over a second. The rules are torch's
functions, so the bits are those of its classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from sizewise.steps.recipe import Recipe


class Optimizer(Protocol):
    """What a training step needs of an optimiser; those of `torch.optim` have it too.

    Attributes:
        param_groups: Groups of parameters, under "params".
        state: What it remembers of each parameter.
    """

    param_groups: list[dict[str, Any]]
    state: Any

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        ...

    def step(self) -> Any:
        """Move the parameters that have gradients."""
        ...


class _Base:
    """Parameters, their gradients, and what is remembered of them.

    Attributes:
        one_by_one: Whether a step never holds more than what it needs for one parameter alone,
            besides what it remembers.
    """

    one_by_one = False

    def __init__(self, parameters: Sequence[Parameter], lr: float, weight_decay: float) -> None:
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr}]
        self.state: dict[Parameter, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def moments(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what is remembered, by kind and name, such as "mean/head.weight".

        Args:
            names: Of its parameters, in their order.
        """
        return {
            f"{kind}/{name}": tensor
            for name, parameter in zip(names, self.parameters, strict=True)
            for kind, tensor in self._known(parameter).items()
        }

    def recall(self, names: Sequence[str], moments: Mapping[str, Tensor]) -> None:
        """Go on from what `moments` returned, in these very tensors; others are passed over."""
        known: dict[str, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            kind, _, name = key.partition("/")
            known.setdefault(name, {})[kind] = tensor
        for name, parameter in zip(names, self.parameters, strict=True):
            if name in known:
                self._learn(parameter, known[name])

    def _known(self, parameter: Parameter) -> Mapping[str, Tensor]:
        return self.state.get(parameter, {})  # type: ignore[no-any-return]

    def _learn(self, parameter: Parameter, known: dict[str, Tensor]) -> None:
        self.state[parameter] = known

    def _moving(self) -> tuple[list[Any], list[Tensor]]:
        """Return the parameters that have gradients, and these."""
        moving = [parameter for parameter in self.parameters if parameter.grad is not None]
        return moving, [p.grad for p in moving if p.grad is not None]


class Sgd(_Base):
    """Stochastic gradient descent, with momentum and weight decay as in `torch.optim.SGD`."""

    one_by_one = True

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.momentum = momentum

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have gradients."""
        moving, gradients = self._moving()
        velocities = [self.state.get(parameter) for parameter in moving]
        sgd(
            moving,
            gradients,
            velocities,
            foreach=False,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if self.momentum:
            self.state.update(zip(moving, velocities, strict=True))

    def _known(self, parameter: Parameter) -> Mapping[str, Tensor]:
        return {"velocity": self.state[parameter]} if parameter in self.state else {}

    def _learn(self, parameter: Parameter, known: dict[str, Tensor]) -> None:
        self.state[parameter] = known["velocity"]


class Adam(_Base):
    """Adam as in `torch.optim.Adam`; with `decoupled`, AdamW; with `amsgrad`, that."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.decoupled, self.amsgrad = decoupled, amsgrad

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have gradients."""
        moving, gradients = self._moving()
        for parameter in moving:
            if parameter not in self.state:
                kinds = ("mean", "square", *(["largest"] if self.amsgrad else []))
                self.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
                self.state[parameter]["step"] = torch.zeros(())
        moments: list[Mapping[str, Tensor]] = [self.state[parameter] for parameter in moving]
        adam(
            moving,
            gradients,
            [moment["mean"] for moment in moments],
            [moment["square"] for moment in moments],
            [moment["largest"] for moment in moments] if self.amsgrad else [],
            [moment["step"] for moment in moments],
            foreach=False,
            decoupled_weight_decay=self.decoupled,
            amsgrad=self.amsgrad,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
        )


MOMENTS = "optimizer/"
"""How names begin under which an optimiser's moments are remembered beside other tensors."""


def recalled(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the moments among what is remembered."""
    found = (name for name in memory if name.startswith(MOMENTS))
    return {name.removeprefix(MOMENTS): memory[name].clone() for name in found}


def make_optimizer(recipe: Recipe, parameters: Sequence[Parameter], lr: float) -> Sgd | Adam:
    """Return a fresh optimiser over the parameters that learn."""
    if recipe.optimizer == "sgd":
        return Sgd(parameters, lr, recipe.momentum, recipe.weight_decay)
    decoupled, amsgrad = recipe.optimizer == "adamw", recipe.optimizer == "amsgrad"
    return Adam(parameters, lr, recipe.weight_decay, decoupled=decoupled, amsgrad=amsgrad)
