"""Running a narrow model beside the masked full one, so that their numbers can be compared."""

import math
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from sizewise.cutting.groups import Channels, Kept
from sizewise.cutting.tracer import Step
from sizewise.cutting.union_find import Mask
from sizewise.errors import ModelError
from sizewise.exchange.view import View, cut
from sizewise.torch_tools.dispatch import DispatchMode
from sizewise.torch_tools.dry_run import computed, named_tensors, operation, run, tensors_in
from sizewise.torch_tools.failures import OTHERWISE, Paths, told

TOLERANCES = {False: 1e-9, True: 1e-6}
"""What rounding may come to in eval and in training mode: batch statistics of a few numbers that
hardly differ magnify it."""

LOW, HIGH = 0.01, 0.99
"""What is drawn at random: one way or the other, where a forward decides by it."""


class Pair:
    """A narrow model and the masked full one, side by side, in float64."""

    def __init__(
        self, small: nn.Module, full: nn.Module, channels: Channels, kept: Kept, places: View
    ) -> None:
        """Take two models that are nobody else's; a pass in training changes their statistics.

        `places` says where the tensors of the narrow model live in the full one.
        """
        self._small, self._full, self._places = small, full, places
        self._small_paths, self._full_paths = Paths(small), Paths(full)
        self._channels, self._mask = channels, channels.mask(kept)
        self._name = type(small).__name__

    def difference(self, given: Sequence[Tensor], training: bool) -> float:
        """Return the largest difference in a mode, relative to the largest number.

        Raises:
            ModelError: It is not rounding, or one of the models cannot run.
        """
        steady = _Steady(LOW)
        error = self._error(given, training, steady)
        if steady.decides:  # By chance, the forward may go another way.
            error = max(error, self._error(given, training, _Steady(HIGH)))
        return error

    def _error(self, given: Sequence[Tensor], training: bool, steady: "_Steady") -> float:
        got, expected = self._outputs(given, training, steady)
        error = _largest(got, expected)
        if training:
            buffers = dict(self._small.named_buffers())
            theirs = cut(self._full.state_dict(), self._places)
            error = max(
                error, *(_largest(buffers[n], theirs[n]) for n in buffers if n in theirs), 0
            )
        if error <= TOLERANCES[training]:
            return error
        where = self._first(given, training, steady)
        cause = "it may treat channels by their number or place"
        if error == float("inf"):
            cause = "it may divide by something that is zero for a masked channel"
        raise ModelError(
            f"{self._name}, cut, differs from its masked self by {error:.1g} of the largest output "
            f"in {'training' if training else 'eval'} mode{where and f', first in {where}'}: "
            f"{cause}; change that layer (docs/cutting.md says what can be cut), {OTHERWISE}"
        )

    def _outputs(
        self, given: Sequence[Tensor], training: bool, steady: "_Steady", *watch: "_Results"
    ) -> tuple[object, object]:
        """Return what both models give; `watch`: what is to see each of them run."""
        # A forward may change what it is given.
        ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
        factors = _Factors(self._small, ours)
        steps, mask = self._channels.steps(training), self._mask
        as_narrow = _AsNarrow(self._full, theirs, steps, mask, factors.seen, self._full_paths)
        try:
            with told(
                self._small_paths,
                f"{self._name} cannot run when it is cut",
                f"its forward may use a number of channels that it stored, {OTHERWISE}",
            ):
                self._small.train(training)
                got = _run(self._small, ours, steady, factors, *watch[:1])
        except ModelError:
            self._run_full(theirs, training, steady)  # If that fails too, the cut is not to blame.
            raise
        return got, self._run_full(theirs, training, steady, as_narrow, *watch[1:])

    def _run_full(self, given: Sequence[Tensor], training: bool, *modes: DispatchMode) -> object:
        mode = "training" if training else "eval"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
        with told(
            self._full_paths,
            f"{self._name} cannot run on inputs of shape {shapes} in {mode} mode, in float64",
            f"give it what it takes, {OTHERWISE}",
        ):
            self._full.train(training)
            return _run(self._full, given, *modes)

    def _first(self, given: Sequence[Tensor], training: bool, steady: "_Steady") -> str:
        """Return the first operation whose result differs, with its module; "" if none does."""
        ours, theirs = _Results(self._small_paths), _Results(self._full_paths)
        self._outputs(given, training, steady, ours, theirs)
        steps: dict[tuple[str, str], list[Step]] = defaultdict(list)
        for step in self._channels.steps(training):
            steps[step.operation, step.module].append(step)
        for (kind, module), number, tensor in ours.found:
            other = theirs.by_place[kind, module][number : number + 1]
            step_there = steps[kind, module][number : number + 1]
            if other and step_there and other[0].shape == step_there[0].shape:
                expected = other[0]
                for dim, ids in step_there[0].ids.items():
                    at = torch.from_numpy(np.flatnonzero(self._mask[ids]))
                    expected = expected.index_select(dim, at)
                if tensor.numel() == expected.numel():
                    expected = expected.reshape(tensor.shape)
                if not _largest(tensor, expected) <= TOLERANCES[training]:
                    return f"{kind} in {module or 'the model'}"
        return ""


def _run(model: nn.Module, given: Sequence[Tensor], *modes: DispatchMode) -> object:
    with ExitStack() as stack:
        stack.enter_context(_unit_scale())
        stack.enter_context(_float64())
        # The plain attention: it runs the operations that were traced.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for mode in modes:
            stack.enter_context(mode)
        return run(model, *given)


def _largest(got: object, expected: object) -> float:
    """Return the largest difference between tensors, relative to the largest number.

    It is infinite where shapes differ, or something is not a number.
    """
    found = 0.0
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor) and other.numel():
            if one.shape != other.shape:
                return float("inf")
            one, other = one.double(), other.double()
            error = float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
            found = max(found, float("inf") if math.isnan(error) else error)
    return found


# ---- what both models run under


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _unit_scale() -> Iterator[None]:
    """Let attention leave its logits undivided, in heads of any size."""
    original = F.scaled_dot_product_attention

    def unscaled(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **{"scale": 1.0, **kwargs})

    # Not a TorchFunctionMode: it does not see the calls from inside nn.MultiheadAttention.
    F.scaled_dot_product_attention = unscaled
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


class _Steady(DispatchMode):
    """Replaces random numbers by constants, the same at every width, and rounds to float64 only.

    `decides` tells whether a single number was drawn, by which a forward may choose its way.
    """

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.decides = False
        self._chance = chance

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        if (kwargs.get("dtype") or torch.int64).is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        torch.default_generator.manual_seed(0)  # For orders and whole numbers.
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if tensor.is_floating_point():
                self.decides |= tensor.numel() == 1
                tensor.fill_(1.0 if "bernoulli" in operation(func) else self._chance)
        return out


# ---- what is meant to differ


class _Scaling(DispatchMode):
    """Knows where a model multiplies or divides by a number that depends on its sizes alone."""

    def __init__(self, model: nn.Module, given: Sequence[Tensor]) -> None:
        super().__init__()
        # What was computed from the model's tensors and inputs.
        self._data: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        for tensor in (*(tensor for _, tensor in named_tensors(model)), *given):
            self._data[tensor] = True

    def _scales(self, func: Any, args: Any) -> bool:
        if operation(func) not in ("mul", "div"):
            return False
        number = isinstance(args[1], Tensor) and not args[1].ndim and args[1] not in self._data
        return number or isinstance(args[1], int | float)

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        out = self._scaled(func, args, kwargs)
        if any(tensor in self._data for tensor in tensors_in((args, kwargs))):
            self._data.update(dict.fromkeys(tensors_in(out), True))
        return out

    def _scaled(self, func: Any, args: Any, kwargs: Any) -> object:
        """Return what an operation returns."""
        raise NotImplementedError


class _Factors(_Scaling):
    """Notes the numbers by which a model scales its tensors, in order."""

    def __init__(self, model: nn.Module, given: Sequence[Tensor]) -> None:
        super().__init__(model, given)
        self.seen: list[Any] = []

    def _scaled(self, func: Any, args: Any, kwargs: Any) -> object:
        if self._scales(func, args):
            self.seen.append(args[1])
        return func(*args, **kwargs)


class _AsNarrow(_Scaling):
    """Lets the full model do what is meant to be otherwise in a narrow one.

    Layer norms and RMS norms see the kept channels only, numbers scale as in the narrow model, and
    sums mask the channels that a loosely cut model drops from a shortcut. The narrow model runs the
    same operations in the same order, which `shrink` has checked.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Sequence[Tensor],
        steps: Sequence[Step],
        mask: Mask,
        factors: Sequence[Any],
        paths: Paths,
    ) -> None:
        super().__init__(model, given)
        self._steps: dict[tuple[str, str], list[Step]] = defaultdict(list)
        for step in reversed(steps):
            self._steps[step.operation, step.module].append(step)
        self._mask, self._paths = mask, paths
        self._factors = iter(factors)

    def _scaled(self, func: Any, args: Any, kwargs: Any) -> object:
        name = operation(func)
        if self._scales(func, args):
            args = (args[0], next(self._factors, args[1]), *args[2:])
        if name == "native_layer_norm":
            return self._normalised(func, *args)
        if name == "mean" and (step := self._next(name)) is not None and step.over is not None:
            # Of squares, over the one dimension that it is told.
            at = torch.from_numpy(np.flatnonzero(self._mask[step.over]))
            args = (args[0].index_select(args[1][0], at), *args[1:])
        out = func(*args, **kwargs)
        if name == "_weight_norm_interface":
            out[0].nan_to_num_()  # A row of zeros has no direction.
        if "add" in computed(func) and out.is_floating_point():
            step = self._next("add")
            if step is not None and step.drops:
                for dim, ids in step.ids.items():
                    out.index_fill_(dim, torch.from_numpy(np.flatnonzero(~self._mask[ids])), 0)
        return out

    def _next(self, name: str) -> Step | None:
        waiting = self._steps[name, self._paths.current]
        return waiting.pop() if waiting else None

    def _normalised(self, func: Any, x: Tensor, shape: Sequence[int], *args: Any) -> object:
        step = self._next("native_layer_norm")
        # The last dimension is the one that is normalised; if several are, none is cut.
        ids = None if step is None else step.ids.get(len(step.shape) - 1)
        if ids is None:
            return func(x, shape, *args)
        at = torch.from_numpy(np.flatnonzero(self._mask[ids]))
        *affine, eps = args  # Weight and bias.
        affine = [None if tensor is None else tensor[at] for tensor in affine]
        out, mean, rstd = func(x[..., at], [len(at)], *affine, eps)
        return torch.zeros_like(x).index_copy_(-1, at, out), mean, rstd


# ---- where they differ


class _Results(DispatchMode):
    """Keeps the results of all operations that compute something, by what and where they are."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self.found: list[tuple[tuple[str, str], int, Tensor]] = []
        self.by_place: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._paths = paths

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        out = func(*args, **kwargs)
        tensors = tensors_in(out)
        if tensors and tensors[0].is_floating_point():
            kept = tensors[0].clone()  # It may be changed in place.
            for kind in computed(func):
                place = kind, self._paths.current
                self.found.append((place, len(self.by_place[place]), kept))
                self.by_place[place].append(kept)
        return out
