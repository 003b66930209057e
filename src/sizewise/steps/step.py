"""One training step: the same code when it is trained, metered and predicted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sizewise.errors import ConfigError, ModelError
from sizewise.steps.label_sets import own_head
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import Optimizer
from sizewise.steps.parts import IGNORED, Weight, divided, weighed
from sizewise.steps.per_sample import PerSample, Sums
from sizewise.steps.precision import Precision, around, computed_in
from sizewise.torch_tools.checkpointing import checkpointed
from sizewise.torch_tools.keeping import AsItIs, InHalf

__all__ = [
    "IGNORED",
    "Loss",
    "backpropagate",
    "compare",
    "cross_entropy",
    "masked_cross_entropy",
    "rest",
    "training_step",
]

Loss = Callable[[nn.Module, Any, Any], Tensor | Iterable[Tensor]]
"""From a module, inputs and targets to a scalar; or to several, each computed when it is asked for.

The gradients of several terms add up, but their activations are never alive together.
"""


def compare(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how far outputs are from what they should be, in the mean.

    It is the cross entropy for classes, and for tags, of which those below 0 do not count; for
    scores, the squared error.

    Args:
        outputs: Logits (B, classes) or (B, T, classes), or those of several label sets; for scores
            (B, 1).
        targets: Classes (B,) or tags (B, T), int64; or scores (B,), float32.
    """
    if targets.is_floating_point():
        # Not F.mse_loss, whose kernel takes a few bytes that torch's fake tensors do not know of.
        return (outputs.squeeze(-1) - targets).square().mean()
    if outputs.ndim == targets.ndim + 2:
        outputs, targets = own_head(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def cross_entropy(module: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, or squared error, of what a module makes of its inputs."""
    return compare(module(inputs), targets)


def masked_cross_entropy(
    module: nn.Module, inputs: Any, targets: Tensor, classes: Tensor | None = None
) -> Tensor:
    """Return the cross entropy with the logits of all other classes set to 0, as HeteroFL does.

    They still count in the softmax, but get no gradient.

    Args:
        module: Gives logits (B, classes), or (B, T, classes), or those of several label sets.
        inputs: A batch.
        targets: Labels (B,), or tags (B, T), of which those below 0 are none.
        classes: The classes that stay; default: those in the batch.
    """
    logits: Tensor = module(inputs)
    shape = logits.shape[targets.ndim :]  # (classes,), or (sets, classes).
    places = shape.numel()
    chosen = targets.flatten() if classes is None else classes.to(targets.device)
    # One place more, which is dropped: to leave out what is no class would need to look at it.
    chosen = chosen.where(chosen >= 0, places)
    own = logits.new_zeros(places + 1).index_fill_(0, chosen, 1.0)[:places]
    return compare(logits * own.view(shape), targets)


def rest(module: nn.Module) -> list[bool]:
    """Put parts of a model in which nothing learns into evaluation mode.

    Frozen layers then neither drop anything nor move the statistics of their norms.

    Returns:
        Whether each of its parameters learns.
    """
    parameters = [learns for child in module.children() for learns in rest(child)]
    parameters += [parameter.requires_grad for parameter in module.parameters(recurse=False)]
    if parameters and not any(parameters):
        module.eval()
    return parameters


def backpropagate(
    terms: Tensor | Iterable[Tensor], weight: Weight = None, scaler: GradScaler | None = None
) -> Tensor:
    """Add the gradients of a loss, term by term, and return its value, detached.

    Args:
        terms: The loss, of a batch or of a part of it.
        weight: The share of the part in the batch; None: it is no part.
        scaler: What scales the gradients; see `precision`.
    """
    if isinstance(terms, Tensor):
        terms = weighed(terms, weight)
        (terms if scaler is None else scaler.scale(terms)).backward()  # type: ignore[no-untyped-call]
        return terms.detach()
    values = []
    for term in terms:
        term = weighed(term, weight)
        (term if scaler is None else scaler.scale(term)).backward()  # type: ignore[no-untyped-call]
        values.append(term.detach())
        del term  # It would stay alive while the next one is computed.
    return torch.stack(values).sum()


def training_step(
    module: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    targets: Any,
    anchors: Sequence[Tensor] = (),
    *,
    loss: Loss = cross_entropy,
    clip: float | None = None,
    proximal: float = 0.0,
    levers: Levers = NONE,
    precision: Precision = "float32",
    scaler: GradScaler | None = None,
    private: PerSample | None = None,
) -> Tensor:
    """Take one optimiser step and return the loss, detached.

    Args:
        module: What is trained, or what holds all networks that take part.
        optimizer: Over the parameters that learn.
        inputs: What the loss gives the module, e.g. images (B, C, H, W).
        targets: What the loss compares with, e.g. labels (B,).
        anchors: The received values of the parameters that learn, in the optimiser's order; needed
            only when `proximal` is positive.
        loss: What to minimise.
        clip: Largest global norm of the gradient.
        proximal: FedProx's mu.
        levers: What makes the step smaller; the type of the optimiser's state is its own affair.
        precision: In what the forward pass runs.
        scaler: What scales the gradients of fp16, over all steps of a stage.
        private: What clips gradients sample by sample, if they are.

    Raises:
        ConfigError: The levers do not go together with `clip`, the loss or the optimiser.
        ModelError: The module cannot be checkpointed.
    """
    # Before the forward pass and to None: old gradients must not be alive beside activations.
    optimizer.zero_grad(set_to_none=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    term = _Proximal(parameters, anchors, proximal) if proximal else None
    batch = divided(inputs, targets, levers.micro_batch if private is None else 1)
    if hasattr(optimizer, "rehearsed"):  # It only looks on, and has seen enough of some parts.
        batch = optimizer.rehearsed(batch)
    loss = computed_in(precision, loss)
    with around(precision), _keeping_less(module, (inputs, targets), levers):
        if levers.step_in_backward:
            some, wanted, weight = next(batch)
            _refuse(weight is not None, "needs whole batches, and levers.micro_batch divides them")
            _refuse(clip is not None, "cannot wait for the norm that recipe.clip needs")
            return _moved_backward(loss(module, some, wanted), optimizer, term)
        if private is not None:
            value = _gathered(private, module, loss, batch, parameters)
        else:
            value = _summed(
                _added(loss(module, some, wanted), share, parameters, scaler)
                for some, wanted, share in batch
            )
    if scaler is not None:
        scaler.unscale_(cast(Any, optimizer))
    if term is not None:
        for parameter in parameters:
            term(parameter)
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(cast(Any, optimizer))
        scaler.update()
    return value


def _gathered(
    private: PerSample,
    module: nn.Module,
    loss: Loss,
    batch: Iterator[tuple[Any, Any, Weight]],
    parameters: Sequence[Tensor],
) -> Tensor:
    """Give parameters the noisy mean of samples' clipped gradients; return the mean loss."""
    sums: Sums = [None] * len(parameters)
    samples = 0

    def gathered(some: Any, wanted: Any) -> Tensor:
        nonlocal samples
        value = backpropagate(loss(module, some, wanted))
        private.gather(parameters, sums)
        samples += 1
        return value

    total = _summed(gathered(some, wanted) for some, wanted, _ in batch)
    private.finish(parameters, sums, samples)
    return total.div_(samples)


def _summed(values: Iterator[Tensor]) -> Tensor:
    """Add up scalars as they come; the bytes of a part do not depend on how many were before it."""
    total = next(values)
    for value in values:
        total.add_(value)
        del value
    return total


def _added(
    terms: Tensor | Iterable[Tensor],
    weight: Weight,
    parameters: Sequence[Tensor],
    scaler: GradScaler | None,
) -> Tensor:
    """Add the gradients of a part of a batch to those of the parts before it."""
    if weight is None or isinstance(terms, Tensor):
        return backpropagate(terms, weight, scaler)
    # A loss may look at its gradients, or drop them, between its terms: it gets only its own.
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    value = backpropagate(terms, weight, scaler)
    for parameter, sofar in zip(parameters, before, strict=True):
        if sofar is not None:
            parameter.grad = sofar if parameter.grad is None else sofar.add_(parameter.grad)
    return value


class _Proximal:
    """A proximal term, added to one gradient after the other."""

    def __init__(
        self, parameters: Sequence[Tensor], anchors: Sequence[Tensor], proximal: float
    ) -> None:
        self._proximal = proximal
        self._anchors = dict(zip(parameters, anchors, strict=True))

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        """Add the gradient of mu/2 ||w - anchor||^2, without building it into the graph."""
        if parameter.grad is not None:
            parameter.grad.add_(parameter - self._anchors[parameter], alpha=self._proximal)


@contextmanager
def _keeping_less(module: nn.Module, batch: Any, levers: Levers) -> Iterator[None]:
    """Let the forward pass keep less for the backward pass, as the levers say."""
    keeper: AsItIs | InHalf = AsItIs()
    with ExitStack() as around:
        if levers.activations == "bfloat16":
            given = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            keeper = InHalf((*module.parameters(), *module.buffers(), *given))
            around.enter_context(saved_tensors_hooks(keeper.pack, keeper.unpack))
        if levers.checkpoint:
            around.enter_context(checkpointed(module, levers.blocks, keeper))
        yield


def _moved_backward(
    value: Tensor | Iterable[Tensor], optimizer: Optimizer, proximal: "_Proximal | None"
) -> Tensor:
    """Go back through a loss and move each parameter as soon as its gradient is there."""
    advance = getattr(optimizer, "advance", None)
    _refuse(not isinstance(value, Tensor), "needs a loss of one term")
    _refuse(advance is None, "needs an optimiser of sizewise")
    moved: set[int] = set()

    def move(parameter: Tensor) -> None:
        if id(parameter) in moved:
            raise ModelError(
                "the gradient of a parameter came in two parts, so it cannot be moved in the "
                "backward pass; do without levers.step_in_backward"
            )
        moved.add(id(parameter))
        if proximal is not None:
            proximal(parameter)
        advance(parameter)  # type: ignore[misc]
        parameter.grad = None

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    handles = [p.register_post_accumulate_grad_hook(move) for p in parameters]
    try:
        return backpropagate(value)
    finally:
        for handle in handles:
            handle.remove()


def _refuse(wrong: bool, wanted: str) -> None:
    if wrong:
        raise ConfigError(f"levers.step_in_backward {wanted}; leave it out")
