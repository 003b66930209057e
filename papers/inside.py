"""All that reproductions use of methods beyond what `docs/add-a-method.md` shows.

Figures about bytes and blocks look inside the methods. Here is the one place where they do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sizewise import config
from sizewise.engines.site import Site
from sizewise.errors import BudgetTooSmall
from sizewise.exchange import checkpoint
from sizewise.exchange.plan import Piece, Plan, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, size_in_bytes
from sizewise.families.base import Method
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.memory import accounting
from sizewise.memory.prediction import Footprint
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedin import FedIN
from sizewise.methods.nefl import NeFL
from sizewise.methods.slt import SLT
from sizewise.runs import preparation
from sizewise.runs.preparation import Setting
from sizewise.surgery.blockwise import Blocks
from sizewise.surgery.submodels import Submodel
from sizewise.training.loop import Shard
from sizewise.training.task import Task

# ---- any method


def footprint(method: Method) -> Footprint:
    """Return the predicted bytes of a step of the whole model."""
    (stage,) = method.stages(0)
    return method.footprint(method.main, stage)


def width_footprint(task: Task, ratio: float) -> Footprint:
    """Return the predicted bytes of a step of a narrower model."""
    method = Widthwise(task)
    (stage,) = method.stages(0)
    return method.footprint(method.piece(ratio), stage)


def device_round(method: Method, state: State, device: Device, shard: Shard) -> tuple[Plan, Update]:
    """Return a device's plan in round 0, and what it sends."""
    plan = method.plan(state, device, 0)
    return plan, method.train(plan, cut(state.tensors, method.view(plan.piece)), shard, {})


def label(plan: Plan) -> str:
    """Return what people call the part of the model that a device trains."""
    return plan.piece.size


def trained(site: Site, state: State, device: Device, round_index: int) -> Update:
    """Return what a device of a federation sends in a round."""
    outcome = site.train(state, site.method.plan(state, device, round_index))
    if not isinstance(outcome, Update):
        raise SystemExit(outcome.reason)
    return outcome


def local_models(setting: Setting) -> Iterator[nn.Module]:
    """Yield every device's model after its local training; valid until the next one."""
    method, site = setting.method, Site(setting.method, setting.dataset, setting.partition)
    state = method.setup()
    for number in range(setting.fleet.total):
        update = trained(site, state, setting.fleet.device(number, 0), 0)
        yield method.copy(update.plan.piece).load({**state.tensors, **update.tensors})


# ---- FeDepth


def counted(method: FeDepth) -> accounting.Summary:
    """Return what the paper's accounting gives for the whole model and its blocks."""
    task = method.task
    inputs = torch.empty((task.recipe.batch, *task.image), device="meta")
    return accounting.summary(task.build(), inputs, method.parts)


def block_footprint(method: FeDepth, number: int) -> Footprint:
    """Return the predicted bytes of training one block and the head, all before it frozen."""
    # A budget of nothing makes it save what it can: frozen blocks whose norms do not look at the
    # batch run on an eighth of it at a time.
    schedule = method._run(0, number, number + 1, ())
    (stage,) = schedule.stages
    return method.footprint(schedule.piece, stage)


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
        stages = [stage.cut for stage in method.schedule(capacity).stages]
    except BudgetTooSmall:
        return None
    if not stages[0]:
        return (tuple(range(len(method.parts.blocks))),), 0
    last = [stage["peers"][-1] if stage["peers"] else stage["blocks"] for stage in stages]
    return tuple(Blocks.read(blocks).learn for blocks in last), len(stages[0]["peers"])


# ---- FedIN


def model_and_ends(method: FedIN) -> tuple[nn.Module, frozenset[str]]:
    """Return FedIN's model, and the names of what all architectures share."""
    return method.pattern(method.main), frozenset(method.view(method.main))


def peak_and_features(method: FedIN, samples: int) -> tuple[int, int]:
    """Return the predicted peak of a device with others' features, and the bytes of those."""
    plan = method.most(method.setup(), Device(0, "any"), 0)
    return plan.predicted or 0, size_in_bytes(method.given(plan, samples))


def sent_extractor(method: Method, update: Update) -> nn.Module:
    """Return the extractor that a device of FedIN has sent, in training mode."""
    stem = method.build(update.plan.piece).get_submodule("stem")
    named = {name: tensor for name, tensor in update.tensors.items() if name.startswith("stem.")}
    stem.load_state_dict({name.removeprefix("stem."): value for name, value in named.items()})
    return stem


# ---- NeFL


def sketch(method: NeFL, submodel: Submodel | None = None) -> nn.Module:
    """Return a submodel, or the full model, without data in its tensors."""
    if submodel is None:
        return method._sketch({})
    blocks = {} if submodel.blocks is None else {"blocks": list(submodel.blocks)}
    return method._sketch({"width": submodel.width, **blocks}).requires_grad_()


def flops_and_peak(method: NeFL, module: nn.Module) -> tuple[int, int]:
    """Return the FLOPs and the predicted peak of a training step of a model."""
    (stage,) = method.stages(0)
    cost = method.predicted(module, stage)
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
        listed = checkpoint.read_tensors(newest)[1]["extras"]["submodels"]
        pieces = [Piece(entry["size"], entry["cut"]) for entry in listed]
    else:
        pieces = list(method.submodels)
    return {piece.size: method.filled(piece, State(tensors)) for piece in pieces}


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
        return self.method.layers

    @property
    def channels(self) -> int:
        """Channels of the widest layer."""
        return self.method.largest

    @property
    def widths(self) -> list[float]:
        """Widths of the heads of steps 1, 2, ..."""
        return self.method.table[1:]

    def share(self, step: int, width: float) -> float:
        """Return what a step with a head of this width takes, over the budget."""
        taken = self.method.bytes_of(step, max(step - self.depth, 0), width)
        return taken / self.method.counted(self.ratio)

    def largest_share(self) -> float:
        """Return the largest share of all steps, step 0 included."""
        return max(self.share(step, width) for step, width in enumerate(self.method.table))


def heads(task: Task, ratio: float, depth: int = 1) -> Heads:
    """Return the steps that SLT finds by the paper's accounting."""
    return Heads(SLT(task, SLT.Options(assign="ratio", depth=depth)), ratio, depth)
