"""FedGKT: small models on devices and a large one on the server teach each other.

He, Annavaram, Avestimehr: "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
NeurIPS 2020 (https://arxiv.org/abs/2007.14513).

    device k:  a small model of its own: stem (features H), a few blocks, a head
               E epochs of  CE(z, y) + alpha KL_T(z_server || z)    (CE alone at first)
               sends H, z and y of all its samples
    server:    the blocks and the head of a large model, run on H
               E_s epochs over what came of  CE(z, y); with `server_distil`,
               KL_T(z_device || z) + alpha CE(z, y)
               sends each device the z of its samples

KL_T(p || q) = T^2 KL(softmax(p / T) + 1e-7 || softmax(q / T)). The large model is the config's; its
stem is not used, so `client` must be a model whose stem gives what the large one's blocks take.
Small models are never averaged: devices learn from each other through the server alone.

The public code's server goes from device to device in every pass and, where their classes differ,
forgets what came first: `order = "devices"`. Here it mixes the samples of all.

In the public code, the server's logits belong to batches, and devices shuffle theirs anew, so
teacher and student look at different images. Here they belong to samples: a device's n-th sample
has row n, whatever batch it is in. As there, features are those of freshly augmented images and of
norms in evaluation mode, and the server's logits are those of its last epoch, in training mode. Its
scheduler watches the test accuracy; here the recipe's schedule counts for both sides. Its
optimisers, Adam with AMSGrad, last for the whole run, one on each device and one on the server:
`optimizers = "run"` with `recipe.optimizer = "amsgrad"`; by default they begin anew in each round.
The server trains on what came in this round; a device that was not asked keeps its logits.

Deployed are each device's small model, alone and with its features sent through the large one. The
accuracy is the mean of the latter, "FedGKT-server"; the mean of the former is "FedGKT-clients".

Discloses: features, logits and labels of all samples of each device, to the server. `clip` and
`noise` blur features and logits, not labels. Weights stay on the devices.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.traffic import Traffic
from sizewise.exchange.view import Tensors
from sizewise.families.base import Deployed, Method
from sizewise.families.disclosure import Blur
from sizewise.fleet.devices import Device
from sizewise.methods.fedgkt.models import Side, Sides, Taught
from sizewise.methods.fedgkt.transfer import Gathered, Pupil, pupils_loss, teachers_loss
from sizewise.steps.optimizers import MOMENTS, recalled
from sizewise.steps.step import Loss
from sizewise.torch_tools.placement import device_of, moved, taken_out
from sizewise.training import loop
from sizewise.training.loop import Shard, own_tensors
from sizewise.training.task import Task

FEATURES, LOGITS, LABELS = "features", "logits", "labels"

SERVED = " with server"
"""How the name of a small model ends whose features go through the large one."""


class FedGKT(Method):
    """Group knowledge transfer."""

    discloses = frozenset({"features", "logits", "labels"})
    caution = (
        "early features of all private samples, and their labels, go to the server; images can be "
        "reconstructed from them, see docs/methods/fedgkt.md; method.clip and method.noise blur "
        "features and logits, nothing hides the labels"
    )
    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked"}
    submodel_type: type[Side] = Side
    work_type: type[Taught] = Taught

    @dataclass(frozen=True)
    class Options(Method.Options, Blur):
        """Options of FedGKT.

        Attributes:
            client: The small model.
            client_args: Further arguments of its factory.
            server_epochs: Passes of the server over what devices sent.
            alpha: Weight of what a device learns from the server.
            temperature: T, by which logits are divided before they are compared.
            server_distil: Whether the server learns from the devices' logits as well.
            order: Whether the server mixes the samples of all devices or, as in the public code,
                trains on one device's after the other's in every pass.
            optimizers: Whether those of devices and server begin anew in each round or, as in the
                public code, last for the run.
        """

        client: str = "resnet8"
        client_args: Mapping[str, Any] = field(default_factory=dict)
        server_epochs: int = 20
        alpha: float = 1.0
        temperature: float = 3.0
        server_distil: bool = False
        order: Literal["mixed", "devices"] = "mixed"
        optimizers: Literal["round", "run"] = "round"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.server_epochs < 1:
                raise ConfigError(
                    f"method.server_epochs must be at least 1, not {self.server_epochs}"
                )
            if not 0 < self.temperature < math.inf or not 0 <= self.alpha < math.inf:
                raise ConfigError("method.temperature must be positive, method.alpha not negative")

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        task.classes_only("fedgkt")
        task.mean_only("fedgkt")
        if task.model.weights is not None or task.recipe.eval_memory is not None:
            raise ConfigError(
                "fedgkt has no single model, so model.weights and recipe.eval_memory "
                "have no meaning; leave them out, and give a built model as a class or function"
            )
        if task.recipe.norm in ("per_width_stats", "per_submodel"):
            raise ConfigError(
                f"recipe.norm = {task.recipe.norm!r} is for submodels of one model; "
                f"with fedgkt use 'batch', 'sbn' or 'tracked'"
            )

    # ---- the two models

    @cached_property
    def submodels(self) -> Sides:
        """The two models."""
        small = self.task.named(self.options.client, self.options.client_args)
        return Sides(self.task, small)

    @cached_property
    def small(self) -> Side:
        """The devices' model."""
        return Side(self.options.client)

    @property
    def feature(self) -> torch.Size:
        """The shape of one sample's features."""
        return self.submodels.small.hidden_shapes[0]

    def setup(self) -> State:
        """Return the large model's part, if it can take the small one's features."""
        expected = self.task.hidden_shapes[0]
        if self.feature != expected:
            raise ConfigError(
                f"the stem of method.client = {self.options.client!r} gives features of shape "
                f"{tuple(self.feature)}, and {self.task.model.name!r} takes "
                f"{tuple(expected)}; choose two models with the same stem"
            )
        return super().setup()

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device its small model; with the server's logits once there are some."""
        return self._plan(device, round_index, f"{LOGITS}/{device.id}" in state.server_state)

    def plan_upper_bound(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan of a device that gets the server's logits."""
        return self._plan(device, round_index, True)

    def _plan(self, device: Device, round_index: int, taught: bool) -> Plan:
        stage = replace(self.task.stage(round_index), work=Taught(taught))
        return self.offer(device, round_index, self.small, stage)

    def example(self, submodel: Any, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of a batch: samples, the server's logits beside them; targets."""
        inputs, targets = super().example(submodel, stage, batch)
        return (inputs, *([self._logits(batch)] if stage.work == Taught(True) else [])), targets

    def _logits(self, rows: int) -> Tensor:
        return torch.empty((rows, self.task.classes), device="meta")

    def flops_per_sample(self, submodel: Submodel, stage: TrainingStage) -> int:
        """Return the FLOPs of training on a sample, and its part of the pass that sends it."""
        # A forward pass costs about a third of a training step.
        return round(super().flops_per_sample(submodel, stage) * (1 + 1 / (3 * stage.epochs)))

    # ---- what travels

    def payload(self, state: State, plan: Plan) -> Tensors:
        """Return the server's logits for the device's samples, in the order it sent them in."""
        taught = plan.stages[0].work == Taught(True)
        return {LOGITS: state.server_state[f"{LOGITS}/{plan.device}"]} if taught else {}

    def traffic(self, plan: Plan, samples: int) -> Traffic:
        """Return the shapes of the server's logits, and of what a device tells of its samples."""
        taught = plan.stages[0].work == Taught(True)
        return Traffic(
            down={LOGITS: self._logits(samples)} if taught else {},
            up={
                FEATURES: torch.empty((samples, *self.feature), device="meta"),
                LOGITS: self._logits(samples),
                LABELS: torch.empty(samples, dtype=torch.int64, device="meta"),
            },
            below={LABELS: self.task.classes},
        )

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train the device's model, which stays with it; tell of its samples."""
        # What its owner froze is not remembered: it is as it was built.
        start = {**own_tensors(self.submodels.pattern(plan.submodel)), **device_state}
        logits = tensors.get(LOGITS)
        pupil = Pupil(shard.inputs, shard.labels, shard.rows, shard.transform, logits)
        lasting = recalled(device_state) if self.options.optimizers == "run" else None
        loss = partial(self.loss, plan.submodel, shard=pupil)
        update = self.trainer.fit(plan, start, pupil, loss, moments=lasting)
        generator = rng.torch_generator(self.task.seed, "send", plan.round, plan.device)
        told = self._tell(self.submodels.module(plan.submodel), shard, generator)
        kept = {**update.tensors, **update.device_state}
        return replace(update, tensors={}, device_state=kept, sample_payload=told)

    @torch.no_grad()
    def _tell(
        self, module: nn.Module, shard: Shard, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Return features, logits and labels of a device's samples, row n for sample n."""
        module.eval()
        features, logits, parts = [], [], self.submodels.small.parts
        for rows in torch.split(shard.rows, self.task.recipe.batch):
            inputs = moved(shard.transform(shard.inputs[rows], generator), device_of(module))
            hidden = parts.run_stem(module, inputs)
            features.append(self.options.blur(hidden, generator))
            later = parts.run_head(module, parts.run_blocks(module, hidden))
            logits.append(self.options.blur(later, generator))
        told = {FEATURES: torch.cat(features), LOGITS: torch.cat(logits)}
        return {**told, LABELS: shard.labels[shard.rows]}

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return a device's loss: cross entropy, and the distance from the server's logits."""
        options = self.options
        return partial(pupils_loss, alpha=options.alpha, temperature=options.temperature)

    # ---- the server, after a round

    def unclipped(self) -> str:
        """Return that features, logits and labels of samples leave a device."""
        return "devices send features, logits and labels of every sample; use another method"

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Train the large model on what came, all of it at once, and keep its logits."""
        told = [(update.plan, update.sample_payload) for update in updates]
        if not told:
            return state
        features, logits, labels = (
            torch.cat([rows[name] for _, rows in told]) for name in (FEATURES, LOGITS, LABELS)
        )
        sizes = [len(rows[LABELS]) for _, rows in told]
        chunks = [sum(sizes)] if self.options.order == "mixed" else sizes
        lesson = Gathered(features, logits, labels, tuple(chunks))
        tensors, moments = self._taught(state, lesson, told[0][0].round)
        split = zip(told, torch.split(lesson.answers, sizes), strict=True)
        answers = {f"{LOGITS}/{plan.device}": rows.clone() for (plan, _), rows in split}
        server_state = {**state.server_state, **answers, **moments}
        return replace(state, tensors=tensors, server_state=server_state)

    def _taught(
        self, state: State, lesson: Gathered, round_index: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the large model's tensors after training on a lesson, and its moments."""
        options, copy = self.options, self.submodels.copy(self.main)
        recipe = replace(self.task.recipe, max_steps=None, proximal=0.0)
        rate = recipe.lr_at(round_index, self.task.rounds)
        stage = copy.actual(TrainingStage(rate, options.server_epochs))
        loss = partial(
            teachers_loss,
            alpha=options.alpha,
            temperature=options.temperature,
            distil=options.server_distil,
        )
        module = copy.load(state.tensors)
        lasting = recalled(state.server_state) if options.optimizers == "run" else None
        generator = rng.torch_generator(self.task.seed, "server", round_index)
        with rng.seeded(self.task.seed, "server dropout", round_index):
            ready = copy.ready(stage)
            train = partial(loop.fit, parameters=ready, moments=lasting)
            done = train(module, stage, lesson, recipe, generator, loss)
        moments = {f"{MOMENTS}{name}": t.cpu() for name, t in (done.moments or {}).items()}
        taught = {name: taken_out(tensor) for name, tensor in copy.tensors.items()}
        copy.release()
        return taught, moments

    # ---- what people run

    def deploy(self, state: State) -> dict[str, Deployed]:
        """Return every device's small model, alone and before the large one."""
        numbers: list[int | None] = [*sorted(state.devices)]
        return {
            f"device {'any' if number is None else number}{ending}": Deployed(
                partial(self._model, state, number, ending == SERVED), number
            )
            for ending in ("", SERVED)
            for number in numbers or [None]
        }

    def _model(self, state: State, number: int | None, server: bool) -> nn.Module:
        fresh = own_tensors(self.submodels.pattern(self.small))
        learned = {} if number is None else state.devices[number]
        small = self.submodels.copy(self.small).load({**fresh, **learned})
        if not server:
            return small
        large = self.submodels.copy(self.main).load(state.tensors)
        stem = [
            small.get_submodule(path) for path in self.submodels.small.parts.in_turn("fedgkt").stem
        ]
        return nn.Sequential(*stem, large)

    def summary_metric(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy with the server."""
        found = [score for name, score in sizes.items() if name.endswith(SERVED)]
        return sum(found) / len(found)
