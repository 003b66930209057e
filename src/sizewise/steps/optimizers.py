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

from sizewise.steps.levers import NONE, Levers, Precision
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
        half: Whether it remembers in bfloat16. It computes in the type of the parameter all the
            same, one parameter after the other.
    """

    one_by_one = False

    def __init__(
        self, parameters: Sequence[Parameter], lr: float, weight_decay: float, memory: Precision
    ) -> None:
        self.parameters, self.lr, self.weight_decay = list(parameters), lr, weight_decay
        self.half = memory == "bfloat16"
        self.one_by_one |= self.half
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr}]
        self.state: dict[Parameter, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have gradients."""
        moving = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not self.half:
            self._move(moving)
            return
        for parameter in moving:
            self._move([parameter])

    def advance(self, parameter: Parameter) -> None:
        """Move one parameter, which has a gradient, in a backward pass: no graph is built there."""
        self._move([parameter])

    def _move(self, moving: list[Any]) -> None:
        raise NotImplementedError

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
        """Go on from what `moments` returned; others are passed over.

        It goes on in these very tensors, unless it remembers in another type.
        """
        known: dict[str, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            kind, _, name = key.partition("/")
            known.setdefault(name, {})[kind] = tensor
        for name, parameter in zip(names, self.parameters, strict=True):
            if name in known:
                dtype = torch.bfloat16 if self.half else parameter.dtype
                own = {
                    k: t if k == "step" else t.to(parameter.device, dtype)
                    for k, t in known[name].items()
                }
                self._learn(parameter, own)

    def _known(self, parameter: Parameter) -> Mapping[str, Tensor]:
        return self.state.get(parameter, {})  # type: ignore[no-any-return]

    def _learn(self, parameter: Parameter, known: dict[str, Tensor]) -> None:
        self.state[parameter] = known


class Sgd(_Base):
    """Stochastic gradient descent, with momentum and weight decay as in `torch.optim.SGD`."""

    one_by_one = True

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        memory: Precision = "float32",
    ) -> None:
        super().__init__(parameters, lr, weight_decay, memory)
        self.momentum = momentum

    def _move(self, moving: list[Any]) -> None:
        velocities = [self.state.get(parameter) for parameter in moving]
        if self.half:
            velocities = [v if v is None else v.to(torch.float32) for v in velocities]
        sgd(
            moving,
            [parameter.grad for parameter in moving],
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
            for parameter, velocity in zip(moving, velocities, strict=True):
                self._remember(parameter, velocity)

    def _remember(self, parameter: Parameter, velocity: Any) -> None:
        if not self.half:
            self.state[parameter] = velocity
        elif parameter in self.state:
            self.state[parameter].copy_(velocity)
        else:
            self.state[parameter] = velocity.to(torch.bfloat16)

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
        memory: Precision = "float32",
    ) -> None:
        super().__init__(parameters, lr, weight_decay, memory)
        self.decoupled, self.amsgrad = decoupled, amsgrad

    def _move(self, moving: list[Any]) -> None:
        dtype = torch.bfloat16 if self.half else None
        for parameter in moving:
            if parameter not in self.state:
                kinds = ("mean", "square", *(["largest"] if self.amsgrad else []))
                self.state[parameter] = {
                    kind: torch.zeros_like(parameter, dtype=dtype) for kind in kinds
                }
                self.state[parameter]["step"] = torch.zeros(())
        moments: list[Mapping[str, Tensor]] = [self.state[parameter] for parameter in moving]
        if self.half:
            moments = [{k: m.to(torch.float32) for k, m in known.items()} for known in moments]
        adam(
            moving,
            [parameter.grad for parameter in moving],
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
        if self.half:
            for parameter, known in zip(moving, moments, strict=True):
                _shift(known["square"], int(known["step"]))
                for kind, moment in known.items():
                    self.state[parameter][kind].copy_(moment)


def _shift(squares: Tensor, step: int) -> None:
    """Cut float32 numbers that are not negative to bfloat16, up or down by turns.

    Adam's second moment changes by a thousandth in a step, and neighbours in bfloat16 are 0.4 %
    apart: rounded to the nearest it would stand still. What is added here before the cut goes
    through all 2^16 amounts that the cut can take away, evenly, so the mean over steps is right.
    """
    golden = 40503  # 2^16 over the golden ratio: any few steps in a row lie far apart.
    squares.view(torch.int32).add_(step * golden % 2**16).bitwise_and_(-(2**16))


MOMENTS = "optimizer/"
"""How names begin under which an optimiser's moments are remembered beside other tensors."""


def recalled(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the moments among what is remembered."""
    found = (name for name in memory if name.startswith(MOMENTS))
    return {name.removeprefix(MOMENTS): memory[name].clone() for name in found}


def make_optimizer(
    recipe: Recipe, parameters: Sequence[Parameter], lr: float, levers: Levers = NONE
) -> Sgd | Adam:
    """Return a fresh optimiser over the parameters that learn."""
    memory = levers.state
    if recipe.optimizer == "sgd":
        return Sgd(parameters, lr, recipe.momentum, recipe.weight_decay, memory)
    return Adam(
        parameters,
        lr,
        recipe.weight_decay,
        decoupled=recipe.optimizer == "adamw",
        amsgrad=recipe.optimizer == "amsgrad",
        memory=memory,
    )
