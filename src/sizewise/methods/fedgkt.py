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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import ConfigError, UpdateRefused
from sizewise.exchange.plan import Submodel, Plan, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, whole
from sizewise.families.base import Method
from sizewise.families.disclosure import Blur
from sizewise.fleet.devices import Device
from sizewise.steps.optimizers import MOMENTS, recalled
from sizewise.steps.step import Loss
from sizewise.surgery.anatomy import Anatomy, Staged
from sizewise.surgery.blockwise import hidden_shapes
from sizewise.training import loop
from sizewise.training.loop import Shard
from sizewise.training.task import Task
from sizewise.training.transfer import Gathered, Pupil, pupils_loss, teachers_loss

FEATURES, LOGITS, LABELS = "features", "logits", "labels"
ALONE, TAUGHT = "local", "distil"
"""Names of a device's stage, without and with the server's logits."""

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

    @dataclass(frozen=True)
    class Options(Blur):
        """Options of FedGKT.

        Attributes:
            client: The small model.
            client_args: Further arguments of its factory.
            server_epochs: Passes of the server over what devices sent.
            alpha: Weight of what a device learns from the server.
            temperature: T, by which logits are divided before they are compared.
            server_distil: Whether the server learns from the devices' logits as well.
            optimizers: Whether those of devices and server begin anew in each round or, as in the
                public code, last for the run.
        """

        client: str = "resnet8"
        client_args: Mapping[str, Any] = field(default_factory=dict)
        server_epochs: int = 20
        alpha: float = 1.0
        temperature: float = 3.0
        server_distil: bool = False
        optimizers: Literal["round", "run"] = "round"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.server_epochs < 1:
                raise ConfigError(
                    f"method.server_epochs must be at least 1, not {self.server_epochs}"
                )
            if not 0 < self.temperature < math.inf or not 0 <= self.alpha < math.inf:
                raise ConfigError("method.temperature must be positive, method.alpha not negative")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        task.classes_only("fedgkt")
        if task.model.weights is not None or task.recipe.eval_memory is not None:
            raise ConfigError(
                "fedgkt has no single model, so model.weights and recipe.eval_memory "
                "have no meaning; leave them out"
            )
        if task.recipe.norm in ("per_width_stats", "per_submodel"):
            raise ConfigError(
                f"recipe.norm = {task.recipe.norm!r} is for pieces of one model; "
                f"with fedgkt use 'batch', 'sbn' or 'tracked'"
            )

    # ---- the two models

    @cached_property
    def main(self) -> Submodel:
        """The server's part of the large model."""
        return Submodel("server")

    @cached_property
    def small(self) -> Submodel:
        """The devices' model."""
        return Submodel(self.options.client, {"part": "client"})

    @cached_property
    def small_task(self) -> Task:
        """The task of a device: the same, with its small model."""
        return self.task.named(self.options.client, self.options.client_args)

    def build(self, piece: Submodel) -> nn.Module:
        """Build the small model, or the large one without its stem."""
        if piece.cut:
            return self.small_task.build()
        model, parts = self.task.build(), self.parts
        blocks = [model.get_submodule(path) for path in parts.blocks]
        head = nn.Sequential(*(model.get_submodule(path) for path in parts.head))
        return Staged(nn.Identity(), blocks, head)

    @cached_property
    def split(self) -> Anatomy:
        """Where the small model's stem is."""
        return self.small_task.anatomy(self.pattern(self.small))

    @cached_property
    def feature(self) -> torch.Size:
        """The shape of one sample's features."""
        return hidden_shapes(self.small_task.build().eval(), self.split, self.task.drawn(2))[0]

    def view(self, piece: Submodel) -> View:
        """Return the server's tensors for the server; devices see none of them."""
        if piece.size not in self._views:
            own = {} if piece.cut else loop.own_tensors(self.pattern(piece))
            self._views[piece.size] = whole(own)
        return self._views[piece.size]

    def setup(self) -> State:
        """Return the large model's part, if it can take the small one's features."""
        if self.feature != self.shapes[0]:
            raise ConfigError(
                f"the stem of method.client = {self.options.client!r} gives features of shape "
                f"{tuple(self.feature)}, and {self.task.model.name!r} takes "
                f"{tuple(self.shapes[0])}; choose two models with the same stem"
            )
        return super().setup()

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device its small model; with the server's logits once there are some."""
        return self._plan(device, round_index, f"{LOGITS}/{device.id}" in state.memory)

    def most(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan of a device that gets the server's logits."""
        return self._plan(device, round_index, True)

    def _plan(self, device: Device, round_index: int, taught: bool) -> Plan:
        (stage,) = self.stages(round_index)
        stages = (replace(stage, name=TAUGHT if taught else ALONE),)
        plan = Plan(device.id, round_index, device.group, self.small, stages)
        return self.affordable(plan, device)

    def example(self, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of a batch: samples, the server's logits beside them; targets."""
        inputs, targets = super().example(stage, batch)
        logits = torch.empty((batch, self.task.classes), device="meta")
        return (inputs, logits) if stage.name == TAUGHT else (inputs,), targets

    def flops_per_sample(self, piece: Submodel, stage: TrainingStage) -> int:
        """Return the FLOPs of training on a sample, and its part of the pass that sends it."""
        # A forward pass costs about a third of a training step.
        return round(super().flops_per_sample(piece, stage) * (1 + 1 / (3 * stage.epochs)))

    # ---- what travels

    def parcel(self, state: State, plan: Plan) -> Tensors:
        """Return the server's logits for the device's samples, in the order it sent them in."""
        if plan.stages[0].name == ALONE:
            return {}
        return {LOGITS: state.memory[f"{LOGITS}/{plan.device}"]}

    def given(self, plan: Plan, samples: int) -> Tensors:
        """Return the shape of the server's logits."""
        if plan.stages[0].name == ALONE:
            return {}
        return {LOGITS: torch.empty((samples, self.task.classes), device="meta")}

    def shared(self, plan: Plan, samples: int) -> Tensors:
        """Return the shapes of what a device tells of all its samples."""
        return {
            FEATURES: torch.empty((samples, *self.feature), device="meta"),
            LOGITS: torch.empty((samples, self.task.classes), device="meta"),
            LABELS: torch.empty(samples, dtype=torch.int64, device="meta"),
        }

    def check(self, state: State, update: Update) -> None:
        """Raise UpdateRefused also if a label is no class."""
        super().check(state, update)
        labels = update.shared[LABELS]
        if not ((labels >= 0) & (labels < self.task.classes)).all():
            raise UpdateRefused(f"'labels' holds numbers outside 0 to {self.task.classes - 1}")

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train the device's model, which stays with it; tell of its samples."""
        # What its owner froze is not remembered: it is as it was built.
        start = {**loop.own_tensors(self.pattern(plan.piece)), **memory}
        pupil = Pupil(shard.images, shard.labels, shard.rows, shard.transform, tensors.get(LOGITS))
        lasting = recalled(memory) if self.options.optimizers == "run" else None
        update = self.fit(plan, start, pupil, moments=lasting)
        generator = rng.torch_generator(self.task.seed, "send", plan.round, plan.device)
        told = self._tell(self.module(plan.piece), shard, generator)
        return replace(update, tensors={}, memory={**update.tensors, **update.memory}, shared=told)

    @torch.no_grad()
    def _tell(
        self, module: nn.Module, shard: Shard, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Return features, logits and labels of a device's samples, row n for sample n."""
        module.eval()
        features, logits = [], []
        for rows in torch.split(shard.rows, self.task.recipe.batch):
            hidden = self.split.run_stem(module, shard.transform(shard.images[rows], generator))
            features.append(self.options.blur(hidden, generator))
            later = self.split.run_head(module, self.split.run_blocks(module, hidden))
            logits.append(self.options.blur(later, generator))
        told = {FEATURES: torch.cat(features), LOGITS: torch.cat(logits)}
        return {**told, LABELS: shard.labels[shard.rows]}

    def objective(self, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return a device's loss: cross entropy, and the distance from the server's logits."""
        options = self.options
        return partial(pupils_loss, alpha=options.alpha, temperature=options.temperature)

    # ---- the server, after a round

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Train the large model on what came, all of it at once, and keep its logits."""
        told = [(update.plan, update.shared) for update in updates]
        if not told:
            return state
        round_index, options = told[0][0].round, self.options
        joined = (torch.cat([shared[n] for _, shared in told]) for n in (FEATURES, LOGITS, LABELS))
        lesson = Gathered(*joined)
        recipe = replace(self.task.recipe, max_steps=None, proximal=0.0)
        copy = self.copy(self.main)
        rate = recipe.lr_at(round_index, self.task.rounds)
        stage = copy.actual(TrainingStage(rate, options.server_epochs))
        distil = options.server_distil
        loss = partial(
            teachers_loss, alpha=options.alpha, temperature=options.temperature, distil=distil
        )
        module = copy.load(state.tensors)
        lasting = recalled(state.memory) if options.optimizers == "run" else None
        generator = rng.torch_generator(self.task.seed, "server", round_index)
        with rng.seeded(self.task.seed, "server dropout", round_index):
            ready = copy.ready(stage)
            train = partial(loop.fit, parameters=ready, moments=lasting)
            done = train(module, stage, lesson, recipe, generator, loss)
        moments = {f"{MOMENTS}{name}": tensor for name, tensor in (done.moments or {}).items()}
        tensors = {name: tensor.detach().clone() for name, tensor in copy.tensors.items()}
        sizes = [len(shared[LABELS]) for _, shared in told]
        split = zip(told, torch.split(lesson.answers, sizes), strict=True)
        answers = {f"{LOGITS}/{plan.device}": rows.clone() for (plan, _), rows in split}
        return replace(state, tensors=tensors, memory={**state.memory, **answers, **moments})

    # ---- what people run

    def deploy(self, state: State) -> dict[str, Callable[[], nn.Module]]:
        """Return every device's small model, alone and before the large one."""
        owners: Mapping[str, int | None] = self.owners(state)
        owners = owners or {"device any": None, f"device any{SERVED}": None}
        return {
            size: partial(self._model, state, number, size.endswith(SERVED))
            for size, number in owners.items()
        }

    def owners(self, state: State) -> dict[str, int]:
        """Return whose small model each begins with."""
        numbers = sorted(state.devices)
        return {f"device {n}{ending}": n for ending in ("", SERVED) for n in numbers}

    def _model(self, state: State, number: int | None, server: bool) -> nn.Module:
        fresh = loop.own_tensors(self.pattern(self.small))
        learned = {} if number is None else state.devices[number]
        small = self.copy(self.small).load({**fresh, **learned})
        if not server:
            return small
        large = self.copy(self.main).load(state.tensors)
        stem = [small.get_submodule(path) for path in self.split.stem]
        return nn.Sequential(*stem, large)

    def headline(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy with the server."""
        found = [score for name, score in sizes.items() if name.endswith(SERVED)]
        return sum(found) / len(found)
