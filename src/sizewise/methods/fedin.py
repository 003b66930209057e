"""FedIN: devices of different architectures learn from each other's features.

Chan, Jiang, Deng, Ngai: "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity"
(https://arxiv.org/abs/2304.00759).

    model:     extractor e, intermediate layers m, classifier c; s_in = e(x), s_out = m(s_in)
    device k:  takes e, c and a batch S of other devices' pairs (s_in, s_out); keeps its own m
               L_local = CE(c(m(e(x))), y);   L_IN = weight * MSE(m(s_in), s_out) on S
               sends e, c and one batch of its own pairs
    server:    e, c <- mean over the devices; remembers the last pairs of each

e and c learn from L_local alone. With g = grad L_local and h = grad L_IN, m follows, by `rule`:

    sum         h + g, the paper's rule (its lambda = 2): both losses are added
    projection  h if <h, g> >= 0, else h - <h, g> / ||g||^2 g: the exact answer to its problem
    sequential  a step along g, then one along h: the paper's ablation
    none        g alone: devices share e and c and nothing else, another ablation of the paper

`aggregate = false` is the paper's other ablation: e and c stay on the device too.

The paper leaves open what is stored and sent. Here the pairs are those of the last batch of full
size that a device trained on, from the forward pass that happens anyway. The server keeps `keep`
batches a device; those it sends are drawn uniformly over devices without the receiver, as many as a
batch has. In its first round a device may have none, and trains locally.

Architectures are any with the same stem and head: that of a device's group (`fleet.group.model`);
else, of `models`, the costliest that fits its bytes. m never leaves a device. Deployed is every
device's own model; the accuracy is their mean.

Discloses: the trained e and c of each device and, unless `rule = "none"`, early and late features
of its samples, to the server and through it to other devices. `clip` and `noise` blur them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Size, Tensor

from sizewise.common import rng
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families.architectures import Architectures
from sizewise.families.disclosure import Blur
from sizewise.families.options import acts_only
from sizewise.fleet.devices import Device
from sizewise.steps.step import Loss
from sizewise.training.intermediate import Lesson, ignore, joined, single
from sizewise.training.loop import Shard
from sizewise.training.task import Task

EARLY, LATE = "features/in", "features/out"
ALONE = "local"
"""The name of a stage without other devices' features; with them it has that of its rule."""


class FedIN(Architectures):
    """Local training and IN training of different architectures."""

    discloses = frozenset({"weights", "features"})
    caution = (
        "early features of private samples go to the server and on to other devices; images can be "
        "reconstructed from them, see docs/methods/fedin.md; method.clip and method.noise blur them"
    )
    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked", "weighting": "equal"}

    @dataclass(frozen=True)
    class Options(Architectures.Options, Blur):
        """Options of FedIN.

        Attributes:
            rule: How the two gradients of the intermediate layers are joined.
            weight: Weight of the IN loss.
            keep: Batches of pairs that the server keeps of each device.
        """

        rule: Literal["sum", "projection", "sequential", "none"] = "sum"
        weight: float = 1.0
        keep: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.weight > 0:
                raise ConfigError(
                    f"method.weight must be positive, not {self.weight}; "
                    f"method.rule = 'none' turns IN training off"
                )
            if self.keep < 1:
                raise ConfigError(f"method.keep must be at least 1, not {self.keep}")
            for name in ("weight", "keep", "clip", "noise"):
                acts_only(self, name, "a method.rule other than 'none'", self.rule != "none")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        task.classes_only("fedin")
        # The two steps of this rule need different bytes.
        self.steady = self.options.rule != "sequential"
        if not self.options.aggregate:
            self.discloses -= {"weights"}
        if self.options.rule == "none":
            self.discloses -= {"features"}
            self.caution = ""

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device its model; with others' features once there are some."""
        stages = (self.stage(self.chosen(device), round_index),)
        if not _owners(state, device.id):
            stages = (replace(stages[0], name=ALONE),)
        return self._plan(device, round_index, stages)

    def most(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan of a device that gets others' features."""
        return self._plan(device, round_index, (self.stage(self.chosen(device), round_index),))

    def _plan(self, device: Device, round_index: int, stages: tuple[TrainingStage, ...]) -> Plan:
        piece = self.piece(stages[0].cut["model"])
        return self.affordable(Plan(device.id, round_index, device.group, piece, stages), device)

    def stage(self, name: str, round_index: int) -> TrainingStage:
        """Return the one stage of a device with this model that gets others' features."""
        rule = ALONE if self.options.rule == "none" else self.options.rule
        return replace(super().stage(name, round_index), name=rule, cut={"model": name})

    def example(self, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of a batch: samples, others' features, those to be shared; targets."""
        inputs, targets = super().example(stage, batch)
        copies = (stage.name != ALONE) + (self.options.rule != "none")
        features = (t for _ in range(copies) for t in self._pairs(batch).values())
        return (inputs, *features), targets

    # ---- what travels beside the model

    @cached_property
    def pair(self) -> tuple[Size, Size]:
        """The shapes of a sample's s_in and s_out, the same for all devices."""
        return self.between(self.main.size)

    def _pairs(self, rows: int) -> dict[str, Tensor]:
        """Return so many pairs without data."""
        shapes = zip((EARLY, LATE), self.pair, strict=True)
        return {name: torch.empty((rows, *shape), device="meta") for name, shape in shapes}

    def given(self, plan: Plan, samples: int) -> Tensors:
        """Return the shapes of the pairs that a device gets: as many as a batch has."""
        return {} if plan.stages[0].name == ALONE else self._pairs(self.task.recipe.batch)

    def shared(self, plan: Plan, samples: int) -> Tensors:
        """Return the shapes of the pairs that a device sends: those of a batch of full size."""
        if self.options.rule == "none":
            return {}
        return self._pairs(min(samples, self.task.recipe.batch))

    def parcel(self, state: State, plan: Plan) -> Tensors:
        """Return pairs of other devices: each from a device, then a row, drawn uniformly."""
        if plan.stages[0].name == ALONE:
            return {}
        owners, rows = _owners(state, plan.device), self.task.recipe.batch
        generator = rng.torch_generator(self.task.seed, "features", plan.round, plan.device)
        drawn = torch.randint(len(owners), (rows,), generator=generator).tolist()
        places = torch.rand(rows, generator=generator).tolist()

        def rows_of(name: str) -> Tensor:
            stored = [state.memory[f"{name}/{owners[number]}"] for number in drawn]
            return torch.stack([s[int(p * len(s))] for s, p in zip(stored, places, strict=True)])

        return {name: rows_of(name) for name in (EARLY, LATE)}

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train the device's own model; send its ends and a batch of features."""
        lesson = Lesson(
            shard.images,
            shard.labels,
            shard.rows,
            shard.transform,
            pairs=tuple(tensors[name] for name in (EARLY, LATE) if name in tensors),
            apart=plan.stages[0].name == "sequential",
            full=min(len(shard), self.task.recipe.batch),
        )
        update = self.parted(self.fit(plan, self.start(plan.piece, tensors, memory), lesson))
        if self.options.rule == "none":
            return update
        generator = rng.torch_generator(self.task.seed, "noise", plan.round, plan.device)
        seen = zip((EARLY, LATE), lesson.seen, strict=True)
        return replace(update, shared={name: self.options.blur(t, generator) for name, t in seen})

    def objective(self, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return what a device minimises, and how its gradients are joined."""
        note = shard.note if isinstance(shard, Lesson) and self.options.rule != "none" else ignore
        split, weight = self.split(stage.cut["model"]), self.options.weight
        if stage.name in ("sum", "projection"):
            project = stage.name == "projection"
            return partial(joined, split=split, note=note, weight=weight, project=project)
        return partial(single, split=split, note=note, weight=weight)

    # ---- the server, after a round

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean of the ends, and a store with the newest pairs of each device."""
        store = {n: t for n, t in state.memory.items() if n.startswith((EARLY, LATE))}

        def stored() -> Iterator[Update]:
            for update in updates:
                for name, rows in update.shared.items():
                    key = f"{name}/{update.plan.device}"
                    known = [store[key]] if key in store else []
                    store[key] = torch.cat([*known, rows])[-self.options.keep * len(rows) :].clone()
                yield update

        merged = super().merge(state, stored())
        return replace(merged, memory={**merged.memory, **store})


def _owners(state: State, receiver: int) -> list[int]:
    """Return the devices whose pairs the server has, without the one that will get some."""
    prefix = f"{EARLY}/"
    found = (int(n.removeprefix(prefix)) for n in state.memory if n.startswith(prefix))
    return sorted(number for number in found if number != receiver)
