"""Small models, data and plans for the tests of methods that train some blocks at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.plan import Plan, Update
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.schedule import in_order
from sizewise.models.common import chain
from sizewise.models.preresnet import PreActivationBlock
from sizewise.steps.recipe import Recipe
from sizewise.surgery.anatomy import Staged
from sizewise.training.task import ModelConfig, Task

IMAGE = (1, 8, 8)
CLASSES = 3
VIT = {"patch": 4, "dim": 8, "depth": 3, "heads": 2, "mlp_ratio": 2.0}
NARROW = "depth_cases:narrow"


def _parts(classes: int, image: tuple[int, int, int]) -> tuple[nn.Module, list[nn.Module], Any]:
    stem = chain(conv=nn.Conv2d(image[0], 4, 3, padding=1, bias=False))
    shapes = ((4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 12, 2))
    blocks: list[nn.Module] = [PreActivationBlock(*shape) for shape in shapes]
    head = chain(
        norm=nn.BatchNorm2d(12),
        relu=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        linear=nn.Linear(12, classes),
    )
    return stem, blocks, head


def narrow(*, classes: int, image: tuple[int, int, int]) -> nn.Module:
    """Four residual blocks whose activations weigh more than their weights."""
    return Staged(*_parts(classes, image))


def sequential(*, classes: int, image: tuple[int, int, int]) -> nn.Module:
    """The same network as a plain list of layers."""
    stem, blocks, head = _parts(classes, image)
    return nn.Sequential(stem, *blocks, head)


class Renamed(nn.Module):
    """The same network with names of its own."""

    def __init__(self, *, classes: int, image: tuple[int, int, int], twist: bool = False) -> None:
        super().__init__()
        self.entry, layers, self.classifier = _parts(classes, image)
        self.layers = nn.ModuleList(layers)
        self.twist = twist

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(x.relu() if self.twist else x)
        return logits


RENAMED = {"stem": "entry", "blocks": "layers", "head": "classifier"}


def perceptron(*, classes: int, image: tuple[int, int, int]) -> nn.Module:
    """A list of layers of which some, the stem among them, have no weights."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(image[1] * image[2], 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, classes),
    )


def make_task(
    model: str = NARROW,
    args: dict[str, Any] | None = None,
    *,
    image: tuple[int, int, int] = IMAGE,
    anatomy: dict[str, Any] | None = None,
    budgets: Sequence[int | None] = (None,),
    ratios: Sequence[float] = (),
    **recipe: Any,
) -> Task:
    """Return a task; recipe values as keywords."""
    chosen = Recipe(**{"lr": 0.05, "batch": 8, "eval_batch": 6, **recipe})
    named = ModelConfig(model, args or {}, anatomy or {})
    return Task(named, chosen, image, CLASSES, 0, 3, tuple(budgets), tuple(ratios))


def make_runner(method: Method) -> DeviceRunner:
    """Return a runner with three devices of 12, 9 and 15 samples."""
    generator = torch.Generator().manual_seed(0)
    image = method.task.input_shape

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % CLASSES
        images = torch.randint(0, 120, (count, *image), generator=generator, dtype=torch.uint8)
        images[torch.arange(count), 0, labels] += 100
        return images, labels

    dataset = Dataset("tiny", *draw(36), *draw(12), ("a", "b", "c"), (0.3,) * image[0], (0.2,))
    order = torch.randperm(36, generator=generator)
    return DeviceRunner(method, dataset, Partition(order, torch.tensor([0, 12, 21, 36])))


def plan_for(
    method: FeDepth,
    runs: Sequence[tuple[int, int]],
    *,
    device: int = 0,
    round_index: int = 0,
    bypassed: Sequence[int] = (),
    budget: int | None = None,
) -> Plan:
    """Return the plan of a device with these runs of blocks, whatever they cost."""
    run = method.scheduler.run
    schedule = in_order([run(None, start, stop, bypassed) for start, stop in runs])
    whole = method.task.stage(round_index)
    stages = tuple(replace(s, lr=whole.lr, epochs=whole.epochs) for s in schedule.stages)
    return Plan(device, round_index, "some", schedule.submodel, stages, budget)


def start(method: FeDepth, *plans: Plan) -> State:
    """Return the state of a server that has all ways out that some plans need."""
    return method.submodels.extended(method.setup(), [plan.submodel for plan in plans])


def train(runner: DeviceRunner, state: State, plan: Plan) -> Update:
    """Do a device's work, which must not be refused."""
    update = runner.train(state, plan)
    assert isinstance(update, Update), update
    return update


def whole_peak(method: FeDepth) -> int:
    """Return the bytes of training the whole model at once."""
    return method.scheduler.peak(method.scheduler.regular(0))
