"""All that reproductions use of methods beyond what `docs/add-a-method.md` shows.

Figures about bytes and blocks look inside the methods. Here is the one place where they do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sizewise import config
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall
from sizewise.exchange import checkpoint
from sizewise.exchange.plan import Plan, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, size_in_bytes
from sizewise.families.base import Method
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.memory import accounting
from sizewise.memory.prediction import Footprint
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.blocks import Run
from sizewise.methods.fedin import FedIN
from sizewise.methods.nefl import NeFL, Nest
from sizewise.methods.nefl.scaling import Scaled
from sizewise.methods.slt import SLT
from sizewise.runs import preparation
from sizewise.runs.preparation import Setting
from sizewise.training.loop import Shard
from sizewise.training.task import Task

# ---- any method


def footprint(method: Method) -> Footprint:
    """Return the predicted bytes of a step of the whole model."""
    return method.cost(method.main, method.task.stage()).footprint


def width_footprint(task: Task, ratio: float) -> Footprint:
    """Return the predicted bytes of a step of a narrower model."""
    method = Widthwise(task)
    return method.cost(method.narrow(ratio), task.stage()).footprint


def device_round(method: Method, state: State, device: Device, shard: Shard) -> tuple[Plan, Update]:
    """Return a device's plan in round 0, and what it sends."""
    plan = method.plan(state, device, 0)
    received = cut(state.tensors, method.submodels.view(plan.submodel))
    return plan, method.train(plan, received, shard, {})


def label(plan: Plan) -> str:
    """Return what people call the part of the model that a device trains."""
    return plan.submodel.label


def trained(runner: DeviceRunner, state: State, device: Device, round_index: int) -> Update:
    """Return what a device of a federation sends in a round."""
    outcome = runner.train(state, runner.method.plan(state, device, round_index))
    if not isinstance(outcome, Update):
        raise SystemExit(outcome.reason)
    return outcome


def local_models(setting: Setting) -> Iterator[nn.Module]:
    """Yield every device's model after its local training; valid until the next one."""
    method = setting.method
    runner, state = DeviceRunner(method, setting.dataset, setting.partition), method.setup()
    for number in range(setting.fleet.total):
        update = trained(runner, state, setting.fleet.device(number, 0), 0)
        yield method.submodels.copy(update.plan.submodel).load({**state.tensors, **update.tensors})


# ---- FeDepth


def counted(method: FeDepth) -> accounting.Summary:
    """Return what the paper's accounting gives for the whole model and its blocks."""
    task = method.task
    inputs = torch.empty((task.recipe.batch, *task.input_shape), device="meta")
    return accounting.summary(task.build(), inputs, task.parts)


def block_footprint(method: FeDepth, number: int) -> Footprint:
    """Return the predicted bytes of training one block and the head, all before it frozen."""
    # A budget of nothing makes it save what it can: frozen blocks whose norms do not look at the
    # batch run on an eighth of it at a time.
    schedule = method.scheduler.run(0, number, number + 1, ())
    (stage,) = schedule.stages
    return method.cost(schedule.submodel, stage).footprint


def decomposition(
    method: FeDepth, capacity: float
) -> tuple[tuple[tuple[int, ...], ...], int] | None:
    """Return the runs of blocks that a device trains, and how many whole models beside them.

    Args:
        method: FeDepth, by bytes or by ratio.
        capacity: The device's bytes or ratio.

    Returns:
        None if the device is refused.
    """
    try:
        works = [stage.work for stage in method.scheduler.schedule(capacity).stages]
    except BudgetTooSmall:
        return None
    runs = [work for work in works if isinstance(work, Run) and work.blocks]
    if not runs:
        return (tuple(range(len(method.task.parts.blocks))),), 0
    last = [run.peers[-1] if run.peers else run.blocks for run in runs]
    return tuple(blocks.learn for blocks in last if blocks), len(runs[0].peers)


# ---- FedIN


def model_and_ends(method: FedIN) -> tuple[nn.Module, frozenset[str]]:
    """Return FedIN's model, and the names of what all architectures share."""
    return method.submodels.pattern(method.main), frozenset(method.submodels.view(method.main))


def peak_and_features(method: FedIN, samples: int) -> tuple[int, int]:
    """Return the predicted peak of a device with others' features, and the bytes of those."""
    plan = method.plan_upper_bound(method.setup(), Device(0, "any"), 0)
    return plan.predicted or 0, size_in_bytes(method.traffic(plan, samples).down)


def sent_extractor(method: Method, update: Update) -> nn.Module:
    """Return the extractor that a device of FedIN has sent, in training mode."""
    stem = method.submodels.build(update.plan.submodel).get_submodule("stem")
    named = {name: tensor for name, tensor in update.tensors.items() if name.startswith("stem.")}
    stem.load_state_dict({name.removeprefix("stem."): value for name, value in named.items()})
    return stem


# ---- NeFL


def sketch(method: NeFL, submodel: Scaled | None = None) -> nn.Module:
    """Return a submodel, or the full model, without data in its tensors."""
    if submodel is None:
        return method.submodels.sketch(Scaled())
    return method.submodels.sketch(submodel).requires_grad_()


def flops_and_peak(method: NeFL, module: nn.Module) -> tuple[int, int]:
    """Return the FLOPs and the predicted peak of a training step of a model."""
    cost = method.costs.of(module, method.main, method.task.stage())
    return cost.flops, cost.footprint.peak


def filled_submodels(folder: Path) -> Mapping[str, nn.Module]:
    """Return the submodels of a finished run with their tensors, smallest first."""
    final = folder / "final.safetensors"
    if not final.is_file():
        raise SystemExit(f"{folder} has no final.safetensors: it is no run, or not a finished one")
    setting = preparation.prepare(config.load(folder / "config.toml"))
    method = setting.method
    if not isinstance(method, NeFL):
        raise SystemExit(f"{folder} is a run of {setting.config.method.name}, not of nefl")
    tensors, _ = checkpoint.read_tensors(final)
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is not None:  # The run's own list: names of submodels may have changed since.
        state = State(tensors, metadata=checkpoint.read_tensors(newest)[1]["metadata"])
        chosen = state.facts(Nest).submodels
    else:
        state, chosen = State(tensors), method.nest
    return {submodel.label: method.submodels.filled(submodel, state) for submodel in chosen}


# ---- SLT


@dataclass(frozen=True)
class Heads:
    """The steps of SLT at a constraint.

    Attributes:
        method: SLT with this constraint.
        ratio: The constraint.
        depth: How many layers learn at full width.
    """

    method: SLT
    ratio: float
    depth: int

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.method.submodels.layers

    @property
    def channels(self) -> int:
        """Channels of the widest layer."""
        return self.method.submodels.largest

    @property
    def widths(self) -> list[float]:
        """Widths of the heads of steps 1, 2, ..."""
        return self.method.table[1:]

    def share(self, step: int, width: float) -> float:
        """Return what a step with a head of this width takes, over the budget."""
        taken = self.method.bytes_of(step, max(step - self.depth, 0), width)
        return taken / (self.method.capacity(self.ratio) or 1)

    def largest_share(self) -> float:
        """Return the largest share of all steps, step 0 included."""
        return max(self.share(step, width) for step, width in enumerate(self.method.table))


def heads(task: Task, ratio: float, depth: int = 1) -> Heads:
    """Return the steps that SLT finds by the paper's accounting."""
    return Heads(SLT(task, SLT.Options(assign="ratio", depth=depth)), ratio, depth)
