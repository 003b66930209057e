"""The bytes of a training step, predicted without running it.

A device's budget is counted in bytes of live tensor storage: parameters, buffers, batch, gradients,
optimiser state, what the forward pass keeps for the backward pass, and temporaries. That figure is
the same on every machine, and `predict` gives exactly what a `Meter` around the real step reads:

    footprint = predict(model, torch.empty(32, 3, 32, 32, device="meta"), optimizer=make_optimizer)
    with Meter(budget=footprint.peak) as meter:  # with one byte less it would raise OutOfBudget
        meter.track(model, optimizer, images, labels)
        training_step(model, optimizer, images, labels)
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sizewise.errors import ConfigError, ModelError
from sizewise.memory.fingerprints import fingerprint
from sizewise.memory.ledger import Footprint, Ledger
from sizewise.memory.meter import Meter, OutOfBudget
from sizewise.steps.optimizers import Optimizer, Sgd
from sizewise.steps.step import rest, training_step
from sizewise.torch_tools.failures import blame
from sizewise.torch_tools.hollow import Hollow, HollowMode, emptied
from sizewise.torch_tools.placement import HOST
from sizewise.torch_tools.remaking import as_parameter, plain_tensors, remade

__all__ = ["Cost", "Footprint", "Meter", "OutOfBudget", "cost", "predict", "resident"]

Step = Callable[..., object]
"""Called as step(module, optimizer, inputs, targets), and with anchors where they are asked for."""

T = TypeVar("T")

OptimizerFactory = Callable[[Sequence[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Cost:
    """What one training step takes.

    Attributes:
        footprint: Bytes, in the steady state, when the optimiser's state exists.
        flops: Floating-point operations, forward and backward.
    """

    footprint: Footprint
    flops: int

    def beside(self, resident: int) -> "Cost":
        """Return what the step takes beside so many bytes of parameters that it does not touch."""
        return replace(self, footprint=self.footprint.beside(resident))


def predict(module: nn.Module, inputs: Any, targets: Any = None, **options: Any) -> Footprint:
    """Return the bytes of one step; see `cost` for what can be given."""
    return cost(module, inputs, targets, **options).footprint


def cost(
    module: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    optimizer: OptimizerFactory = Sgd,
    trainable: Collection[str] | None = None,
    step: Step = training_step,
    anchored: bool = False,
    training: bool = True,
    device: torch.device = HOST,
) -> Cost:
    """Return what one step takes.

    Nothing is computed: the step runs on a copy whose tensors have shapes but no data. A model that
    looks at its data, or uses a kernel whose buffers only the real one knows (`nn.LSTM`), takes one
    real step on a real copy instead. The given module is not touched.

    Args:
        module: What is trained; its tensors may be on the meta device. For several networks at
            once, a module that holds them all.
        inputs: A batch, as the step takes it. Only shapes and types matter, so tensors on the meta
            device do; containers of tensors are fine.
        targets: Likewise; default: one class label per input, int64 (B,).
        optimizer: From the parameters that learn to an optimiser, of ours or of `torch.optim`.
        trainable: Prefixes of the names of the parameters that learn; default: those that do now.
        step: The training step, called as step(module, optimizer, inputs, targets).
        anchored: Whether the step gets a copy of every parameter that learns as a fifth argument,
            for a proximal term.
        training: False gives a forward pass in evaluation mode, without gradients.
        device: Where it runs: an accelerator of this machine has kernels of its own, and what stays
            in host memory is not counted.

    Raises:
        ModelError: Nothing is trainable, a prefix names no parameter, or the module cannot take a
            step, whatever it is that goes wrong in it.
    """
    try:
        if targets is None:
            targets = torch.empty(len(inputs), dtype=torch.int64, device="meta")
        spec = _Spec((inputs, targets), optimizer, step, anchored, training, device)
        learning = learning_names(module, trainable) if training else frozenset()
        return _known(module, learning, spec)
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        raise _refusal(module, blame(error, module)) from error


def resident(module: nn.Module, device: torch.device = HOST) -> int:
    """Return the bytes of a model's own tensors, each storage counted once."""
    ledger = Ledger(device)
    hollow = remade(module, partial(emptied, device=device))
    ledger.record("parameters", hollow)
    return ledger.live


def _known(module: nn.Module, learning: frozenset[str], spec: "_Spec") -> Cost:
    """Return what a step takes, if it is known; else find out."""
    try:
        step = spec.batch, spec.step, spec.anchored, spec.training, spec.device
        key = fingerprint((module, learning, step), {})
        whole = key, fingerprint(spec.optimizer, {})
        known = _costs.get(whole)
    except Exception:  # something in it cannot be compared with anything, so nothing is known
        return _predict(module, learning, spec).cost(spec.optimizer)
    if known is None:
        # The same step with another optimiser need not be run again.
        run = _runs.get(key) or _remember(_runs, key, _predict(module, learning, spec), RUNS)
        known = _remember(_costs, whole, run.cost(spec.optimizer), COSTS)
    return known


def _remember(cache: dict[Hashable, T], key: Hashable, value: T, size: int) -> T:
    if len(cache) >= size:
        cache.clear()
    cache[key] = value
    return value


COSTS, RUNS = 256, 64
_costs: dict[Hashable, Cost] = {}
_runs: "dict[Hashable, _Run]" = {}


@dataclass(frozen=True)
class _Spec:
    """What a prediction depends on besides the module."""

    batch: tuple[Any, Any]
    optimizer: OptimizerFactory
    step: Step
    anchored: bool
    training: bool
    device: torch.device


def learning_names(module: nn.Module, prefixes: Collection[str] | None) -> frozenset[str]:
    """Return the names of the parameters that learn."""
    named = list(module.named_parameters())
    if prefixes is None:
        names = {name for name, parameter in named if parameter.requires_grad}
    else:
        names = set()
        for prefix in prefixes:
            found = {name for name, _ in named if f"{name}.".startswith(f"{prefix}.")}
            if not found:
                raise ModelError(
                    f"no parameter of {type(module).__name__} has the name or prefix {prefix!r}"
                )
            names |= found
    if not names:
        raise ModelError(
            f"{type(module).__name__} has no parameter that learns; "
            "name some as trainable, or ask for training=False"
        )
    return frozenset(names)


def _predict(module: nn.Module, learning: frozenset[str], spec: _Spec) -> "_Run":
    with torch.random.fork_rng(devices=[]):  # dropout must not move the run's random numbers
        # What the CPU kernel of an LSTM keeps for its backward pass, only the real kernel knows.
        if not any(isinstance(layer, nn.LSTM) for layer in module.modules()):
            try:
                hollow = partial(emptied, device=spec.device)
                return _simulate(remade(module, hollow), learning, spec, hollow)
            except ConfigError:
                raise
            except Exception:  # noqa: S110
                pass  # it looks at its data; or it cannot run at all, and will say so again now
        real = partial(_same_data, device=spec.device)
        twin = remade(module, real)
        try:
            return _simulate(twin, learning, spec, real)
        except (ModelError, ConfigError):
            raise  # It is a sentence already.
        except Exception as error:
            raise _refusal(module, blame(error, module, twin)) from error


def _refusal(module: nn.Module, reason: str) -> ModelError:
    return ModelError(f"{type(module).__name__} cannot take a step: {reason}")


def _same_data(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return torch.zeros_like(tensor, device=device)
    return tensor.detach().to(device, copy=True)


def _simulate(
    twin: nn.Module,
    learning: frozenset[str],
    spec: _Spec,
    same: Callable[[Tensor], Tensor],
) -> "_Run":
    """Run a step on a copy of the module made of tensors of another kind, and account for it."""
    batch = tree_map(lambda leaf: same(leaf) if isinstance(leaf, Tensor) else leaf, spec.batch)
    twin.train(spec.training)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name in learning)
    rest(twin)
    before = list(plain_tensors(twin))
    found = _step(twin, batch, spec, same, [])
    known = {id(tensor) for tensor in before}
    kept = [tensor for tensor in plain_tensors(twin) if id(tensor) not in known]
    if not kept:
        return found
    # It keeps what it computed, up to and during the next step: only that one is like all others.
    del before, known
    for parameter in twin.parameters():
        parameter.grad = None
    return _step(twin, batch, spec, same, kept)


def _step(
    twin: nn.Module,
    batch: tuple[Any, Any],
    spec: _Spec,
    same: Callable[[Tensor], Tensor],
    kept: list[Tensor],
) -> "_Run":
    """Run a step; `kept` is what the step before left in the module, and is used up."""
    ledger = Ledger(spec.device)
    ledger.record("parameters", twin)
    ledger.record("batch", batch)
    ledger.record("activations", kept)
    kept.clear()
    if not spec.training:
        with ledger, torch.no_grad():
            twin(batch[0])
        return _Run(ledger)
    parameters = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    stand_in = _StandIn(parameters, ledger)
    anchors = [[same(parameter) for parameter in parameters]] if spec.anchored else []
    ledger.record("parameters", anchors)
    with ledger:
        spec.step(twin, stand_in, *batch, *anchors)
    learning = [as_parameter(emptied(parameter)) for parameter in parameters]
    return _Run(ledger, learning, frozenset(stand_in.moved), frozenset(stand_in.alone))


@dataclass(frozen=True)
class _Run:
    """A step that was followed, but for what its optimiser does.

    Attributes:
        ledger: What lived when.
        parameters: Hollow ones like those that learn; in an evaluation, none.
        moved: The numbers of those that moved.
        alone: The numbers of those that moved alone.
    """

    ledger: Ledger
    parameters: Sequence[nn.Parameter] = ()
    moved: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()

    def cost(self, optimizer: OptimizerFactory) -> Cost:
        """Return what the step takes with an optimiser."""
        extra = _optimizer_bytes(optimizer, self) if self.parameters else ()
        return Cost(self.ledger.footprint(*extra), self.ledger.flops)


class _StandIn:
    """Takes the optimiser's place in a simulated step and notes when it is asked to act."""

    def __init__(self, parameters: list[nn.Parameter], ledger: Ledger) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[object, object] = {}
        self.ledger = ledger
        self.moved: set[int] = set()
        self.alone: set[int] = set()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there are no gradients yet."""

    def rehearsed(self, parts: Iterable[tuple[Any, Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the parts of a batch, but for those that do what the one before them did.

        Bytes depend on shapes, also on those of the part before: gradients exist from the second
        one on, and a model may keep what it computed. So the third of equal parts is like the
        second, and only its FLOPs count.
        """
        before: list[list[torch.Size]] = []
        flops = 0
        for part in parts:
            leaves = [leaf for leaf in tree_leaves(part[:2]) if isinstance(leaf, Tensor)]
            before = [*before[-2:], [leaf.shape for leaf in leaves]]
            hollow = all(isinstance(leaf, Hollow) for leaf in leaves)  # Others may be looked at.
            if hollow and len(before) == 3 and before[0] == before[1] == before[2]:
                self.ledger.flops += flops
                continue
            flops = -self.ledger.flops
            yield part
            flops += self.ledger.flops

    def step(self) -> None:
        """Note which parameters would move, and what is alive."""
        gradients = {i: p.grad for i, p in enumerate(self.param_groups[0]["params"])}
        present = {i: gradient for i, gradient in gradients.items() if gradient is not None}
        self.moved |= present.keys()
        self.ledger.record("gradients", present)
        self.ledger.note_step()

    def advance(self, parameter: nn.Parameter) -> None:
        """Note that a parameter would move alone."""
        number = self._numbers[id(parameter)]
        self.moved.add(number)
        self.alone.add(number)
        if parameter.grad is not None:
            self.ledger.record("gradients", parameter.grad)
        self.ledger.note_step(number)


def _optimizer_bytes(make: OptimizerFactory, run: _Run) -> tuple[int, dict[int | None, int]]:
    """Return the bytes of an optimiser's state, and the most its steps add for a moment.

    Those are given by the number of the parameter that moves alone; under None, for all at once.
    """
    twins = [as_parameter(emptied(parameter)) for parameter in run.parameters]
    for index in run.moved:
        twins[index].grad = emptied(twins[index])
    optimizer = make(twins)
    if not getattr(optimizer, "one_by_one", False) and not run.alone:
        state, transient = _steady_bytes(optimizer, twins, run.ledger.device)
        return state, {None: transient}
    # Many have the same shape.
    kinds = [(p.shape, p.stride(), p.dtype, p.grad is not None) for p in twins]
    examples = dict(zip(kinds, twins, strict=True))
    each = {kind: _steady_bytes(make([p]), [p], run.ledger.device) for kind, p in examples.items()}
    transients: dict[int | None, int] = {n: each[kind][1] for n, kind in enumerate(kinds)}
    return sum(each[kind][0] for kind in kinds), {**transients, None: max(transients.values())}


def _steady_bytes(
    optimizer: Optimizer, parameters: Sequence[Tensor], device: torch.device | None
) -> tuple[int, int]:
    with HollowMode():
        optimizer.step()  # the first step creates the state
        with Meter(device=device) as meter:
            meter.track(optimizer)
            state = meter.live
            meter.track(parameters, [p.grad for p in parameters if p.grad is not None])
            before = meter.live
            optimizer.step()
            return state, meter.peak - before
