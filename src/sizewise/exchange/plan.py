"""What travels between the server and a device: plans out, updates or refusals back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sizewise.common.structure import build
from sizewise.exchange.view import Tensors
from sizewise.steps.levers import NONE, Levers


@dataclass(frozen=True)
class Submodel:
    """What a device holds of the model. A method derives its own, with the values that define it.

    Two submodels are the same if their values are. This one, without values, is the whole model.
    """

    @property
    def label(self) -> str:
        """What people call it."""
        return "full"

    @property
    def shape_key(self) -> "Submodel":
        """The submodel that stands for all whose tensors have the same shapes.

        They share a working copy of the model, a predicted peak and a metered one.
        """
        return self


@dataclass(frozen=True)
class Work:
    """What a stage does. A method derives its own; this one is ordinary training of all there is.

    Stages of equal work, on submodels of equal shapes, need the same bytes.
    """

    @property
    def label(self) -> str:
        """What people call it."""
        return "all"


@dataclass(frozen=True)
class TrainingStage:
    """One stretch of a device's training.

    Attributes:
        lr: The learning rate.
        epochs: Passes over the device's data.
        trainable: Prefixes of the names of the tensors that learn; None is all of them.
        work: What the method has to know to run it, such as its blocks.
        levers: What makes its steps smaller.
        part: Where stages share their passes, which of how many equal parts of the batches this one
            takes, counted from 0; at least one batch.
    """

    lr: float
    epochs: int
    trainable: tuple[str, ...] | None = None
    work: Work = field(default_factory=Work)
    levers: Levers = NONE
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Plan:
    """What one device does in one round. Small, immutable and JSON-able.

    Attributes:
        device: The device's number.
        round: The round, counted from 0.
        group: The device's class.
        submodel: What it holds of the model.
        stages: What it trains, in order.
        budget: Its bytes; None is unlimited.
        predicted: Predicted peak of one training step in bytes.
    """

    device: int
    round: int
    group: str
    submodel: Submodel
    stages: tuple[TrainingStage, ...]
    budget: int | None = None
    predicted: int | None = None


def read_plan(values: Mapping[str, Any], submodel: type[Submodel], work: type[Work]) -> Plan:
    """Return the plan that `plain` made JSON-able, given a method's kinds of submodel and work."""
    stages = [{**stage, "work": {}} for stage in values["stages"]]
    plan = build(Plan, {**values, "submodel": {}, "stages": stages}, "plan")
    return replace(
        plan,
        submodel=build(submodel, values["submodel"], "plan.submodel"),
        stages=tuple(
            replace(stage, work=build(work, given["work"], "plan.stages.work"))
            for stage, given in zip(plan.stages, values["stages"], strict=True)
        ),
    )


def portions(plans: Sequence[Plan], most: Callable[[Plan], int]) -> list[list[Plan]]:
    """Divide plans, in order, into runs of those that are alike but for their devices.

    `most` tells how many may be in a run that begins with a plan.
    """
    found: list[list[Plan]] = []
    limit = 0
    for plan in plans:
        last = found[-1] if found else []
        if len(last) < limit and replace(plan, device=last[0].device) == last[0]:
            last.append(plan)
        else:
            found.append([plan])
            limit = most(plan)
    return found


@dataclass(frozen=True)
class Update:
    """What a device sends back.

    Attributes:
        plan: The plan it followed.
        tensors: What it trained, by local name; the view of its plan says where each belongs.
        samples: Size of its training data.
        steps: Optimiser steps it took.
        loss: Mean training loss over those steps.
        peak_bytes: Metered peak of one training step.
        seconds: Time it took.
        device_state: What it will remember in its next round; stays with the device, never merged.
        rows: For tensors of which it sends some rows only: which. Only these count as covered.
        sample_payload: What it tells of its samples, such as features: a row each; never merged.
    """

    plan: Plan
    tensors: Tensors
    samples: int
    steps: int
    loss: float
    peak_bytes: int | None = None
    seconds: float = 0.0
    device_state: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sample_payload: Mapping[str, Tensor] = field(default_factory=dict)


def observed(updates: Iterable[Update], look: Callable[[Update], None]) -> Iterator[Update]:
    """Yield updates as they come, each after it was looked at."""
    for update in updates:
        look(update)
        yield update


@dataclass(frozen=True)
class Refusal:
    """A device that did not take part in a round, or whose update was not merged, and why."""

    device: int
    round: int
    group: str
    reason: str
