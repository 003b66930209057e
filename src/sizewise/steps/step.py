"""One training step: the same code when it is trained, metered and predicted."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.steps.label_sets import own_head
from sizewise.steps.optimizers import Optimizer

Loss = Callable[[nn.Module, Any, Any], Tensor | Iterable[Tensor]]
"""From a module, inputs and targets to a scalar; or to several, each computed when it is asked for.

The gradients of several terms add up, but their activations are never alive together.
"""

IGNORED = -100
"""The tag of what has none: padding, and the later pieces of a word."""


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
    chosen = targets.flatten() if classes is None else classes
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


def backpropagate(terms: Tensor | Iterable[Tensor]) -> Tensor:
    """Add the gradients of a loss, term by term, and return its value, detached."""
    if isinstance(terms, Tensor):
        terms.backward()  # type: ignore[no-untyped-call]
        return terms.detach()
    values = []
    for term in terms:
        term.backward()
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
    """
    # Before the forward pass and to None: old gradients must not be alive beside activations.
    optimizer.zero_grad(set_to_none=True)
    value = backpropagate(loss(module, inputs, targets))
    if proximal or clip is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if proximal:
        # The gradient of mu/2 ||w - anchor||^2, added without building it into the graph.
        with torch.no_grad():
            for parameter, anchor in zip(parameters, anchors, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - anchor, alpha=proximal)
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    return value
