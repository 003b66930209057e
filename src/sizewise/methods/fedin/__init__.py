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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sizewise.common import rng
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update, Work, observed
from sizewise.exchange.state import State
from sizewise.exchange.traffic import Traffic
from sizewise.exchange.view import Tensors
from sizewise.families.disclosure import Blur
from sizewise.families.options import acts_only
from sizewise.fleet.devices import Device
from sizewise.methods.fedin.architectures import Architectures
from sizewise.methods.fedin.intermediate import Lesson, ignore, joined, single
from sizewise.steps.levers import NONE
from sizewise.steps.step import Loss
from sizewise.torch_tools.placement import moved
from sizewise.training.loop import Shard
from sizewise.training.task import Task

EARLY, LATE = "features/in", "features/out"

Rule = Literal["sum", "projection", "sequential", "none"]


@dataclass(frozen=True)
class Lessons(Work):
    """By which rule gradients are joined; "none" is local training, without others' features."""

    rule: Rule = "none"

    @property
    def label(self) -> str:
        """What people call it."""
        return "local" if self.rule == "none" else self.rule


class FedIN(Architectures):
    """Local training and IN training of different architectures."""

    discloses = frozenset({"weights", "features"})
    caution = (
        "early features of private samples go to the server and on to other devices; images can be "
        "reconstructed from them, see docs/methods/fedin.md; method.clip and method.noise blur them"
    )
    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked", "weighting": "equal"}
    work_type: type[Lessons] = Lessons
    divides_batches = False  # Other devices' features come with a batch, and some are noted of it.

    @dataclass(frozen=True)
    class Options(Architectures.Options, Blur):
        """Options of FedIN.

        Attributes:
            rule: How the two gradients of the intermediate layers are joined.
            weight: Weight of the IN loss.
            keep: Batches of pairs that the server keeps of each device.
        """

        rule: Rule = "sum"
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

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        task.classes_only("fedin")
        # The two steps of this rule need different bytes.
        self.constant_step_cost = self.options.rule != "sequential"
        if not self.options.aggregate:
            self.discloses -= {"weights"}
        if self.options.rule == "none":
            self.discloses -= {"features"}
            self.caution = ""

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device its model; with others' features once there are some."""
        stage = self.stage(round_index)
        if not _owners(state, device.id):
            stage = replace(stage, work=Lessons())
        return self.offer(device, round_index, self.chosen(device), stage)

    def plan_upper_bound(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan of a device that gets others' features."""
        return self.offer(device, round_index, self.chosen(device), self.stage(round_index))

    def stage(self, round_index: int) -> TrainingStage:
        """Return the one stage of a device that gets others' features."""
        return replace(super().stage(round_index), work=Lessons(self.options.rule))

    def example(self, submodel: Any, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of a batch: samples, others' features, those to be shared; targets."""
        inputs, targets = super().example(submodel, stage, batch)
        copies = _learns_from_others(stage) + (self.options.rule != "none")
        features = (t for _ in range(copies) for t in self._pairs(batch).values())
        return (inputs, *features), targets

    def flops_per_sample(self, submodel: Submodel, stage: TrainingStage) -> int:
        """Return the FLOPs of training on a sample; of two steps in turn, those of both."""
        found = super().flops_per_sample(submodel, stage)
        if stage.work != Lessons("sequential"):
            return found
        # That is a step along g; one along both has h as well.
        alone, both = (
            super(FedIN, self).flops_per_sample(submodel, replace(stage, work=work, levers=NONE))
            for work in (Lessons(), Lessons("sum"))
        )
        return found + both - alone

    # ---- what travels beside the model

    def _pairs(self, rows: int) -> dict[str, Tensor]:
        """Return so many pairs without data; they have the same shapes on all devices."""
        shapes = self.submodels.task_of(self.main).hidden_shapes
        pair = zip((EARLY, LATE), (shapes[0], shapes[-1]), strict=True)
        return {name: torch.empty((rows, *shape), device="meta") for name, shape in pair}

    def traffic(self, plan: Plan, samples: int) -> Traffic:
        """Return the shapes of pairs: a device gets and sends as many as a batch has."""
        batch = self.task.recipe.batch
        return Traffic(
            down=self._pairs(batch) if _learns_from_others(plan.stages[0]) else {},
            up={} if self.options.rule == "none" else self._pairs(min(samples, batch)),
        )

    def payload(self, state: State, plan: Plan) -> Tensors:
        """Return pairs of other devices: each from a device, then a row, drawn uniformly."""
        if not _learns_from_others(plan.stages[0]):
            return {}
        owners, rows = _owners(state, plan.device), self.task.recipe.batch
        generator = rng.torch_generator(self.task.seed, "features", plan.round, plan.device)
        drawn = torch.randint(len(owners), (rows,), generator=generator).tolist()
        places = torch.rand(rows, generator=generator).tolist()

        def rows_of(name: str) -> Tensor:
            stored = [state.server_state[f"{name}/{owners[number]}"] for number in drawn]
            return torch.stack([s[int(p * len(s))] for s, p in zip(stored, places, strict=True)])

        return {name: rows_of(name) for name in (EARLY, LATE)}

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train the device's own model; send its ends and a batch of features."""
        (stage,), device = plan.stages, torch.device(self.task.device)
        lesson = Lesson(
            shard.inputs,
            shard.labels,
            shard.rows,
            shard.transform,
            pairs=moved(tuple(tensors[n] for n in (EARLY, LATE) if n in tensors), device),
            apart=stage.work == Lessons("sequential"),
            full=min(len(shard), self.task.recipe.batch),
        )
        start = self.start(plan.submodel, tensors, device_state)
        loss = partial(self.loss, plan.submodel, shard=lesson)
        update = self.parted(self.trainer.fit(plan, start, lesson, loss))
        if self.options.rule == "none":
            return update
        generator = rng.torch_generator(self.task.seed, "noise", plan.round, plan.device)
        seen = zip((EARLY, LATE), lesson.seen, strict=True)
        told = {name: self.options.blur(rows, generator) for name, rows in seen}
        return replace(update, sample_payload=told)

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return what a device minimises, and how its gradients are joined."""
        note = shard.note if isinstance(shard, Lesson) and self.options.rule != "none" else ignore
        split, weight = self.submodels.task_of(submodel).parts, self.options.weight
        if stage.work in (Lessons("sum"), Lessons("projection")):
            project = stage.work == Lessons("projection")
            return partial(joined, split=split, note=note, weight=weight, project=project)
        return partial(single, split=split, note=note, weight=weight)

    # ---- the server, after a round

    def unclipped(self) -> str:
        """Return that features of samples leave a device, or what is so of all such methods."""
        shares = "devices share features of their samples; use another method"
        return super().unclipped() if self.options.rule == "none" else shares

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean of the ends, and a store with the newest pairs of each device."""
        store = {n: t for n, t in state.server_state.items() if n.startswith((EARLY, LATE))}

        def keep(update: Update) -> None:
            for name, rows in update.sample_payload.items():
                key = f"{name}/{update.plan.device}"
                known = [store[key]] if key in store else []
                store[key] = torch.cat([*known, rows])[-self.options.keep * len(rows) :].clone()

        merged = super().merge(state, observed(updates, keep))
        return replace(merged, server_state={**merged.server_state, **store})


def _learns_from_others(stage: TrainingStage) -> bool:
    return stage.work != Lessons()


def _owners(state: State, receiver: int) -> list[int]:
    """Return the devices whose pairs the server has, without the one that will get some."""
    prefix = f"{EARLY}/"
    found = (int(n.removeprefix(prefix)) for n in state.server_state if n.startswith(prefix))
    return sorted(number for number in found if number != receiver)
