"""Mutual learning: several outputs for one batch that learn from the labels and from each other.

Zhang, Xiang, Hospedales, Lu: "Deep Mutual Learning", CVPR 2018 (https://arxiv.org/abs/1706.00384).
DepthFL's exits and FeDepth's models do this.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from sizewise.steps.step import compare


def mutual_learning(logits: Sequence[Tensor], labels: Tensor, weight: float = 1.0) -> Tensor:
    """Return the sum over i of CE(z_i, y) + weight * mean over j != i of KL(p_j || p_i).

    p_j = softmax(z_j) is fixed: each learns from the others, and does not teach them.

    Args:
        logits: z_1, z_2, ..., each (B, classes).
        labels: Classes (B,).
        weight: How much they learn from each other; 0: not at all.
    """
    total = compare(logits[0], labels)
    for own in logits[1:]:
        total = total + compare(own, labels)
    if not weight or len(logits) == 1:
        return total
    for own in logits:
        guesses = own.log_softmax(-1)
        for other in logits:
            if other is not own:
                divergence = F.kl_div(guesses, other.detach().softmax(-1), reduction="batchmean")
                total = total + weight / (len(logits) - 1) * divergence
    return total
