"""Gradients that are clipped sample by sample, with noise: DP-SGD, one sample at a time.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy",
CCS 2016 (https://arxiv.org/abs/1607.00133). For a batch of B samples with gradients g_i:

    g <- (sum_i g_i min(1, C / ||g_i||) + z C normal) / B

One sample more or less moves the sum by at most C. Samples run through the model one by one: that
takes longer than all at once, and far fewer bytes (benchmarks/per_sample.md).
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sizewise.common import rng
from sizewise.steps.recipe import Recipe

Sums = list[Tensor | None]
"""For each parameter, the clipped gradients of the samples so far."""


@dataclass(frozen=True)
class PerSample:
    """How the gradients of samples are clipped and hidden.

    Attributes:
        clip: The largest norm of one, over all parameters that learn.
        noise: The deviation of the noise on their sum, over `clip`.
        generator: Where noise comes from; None where only bytes matter.
    """

    clip: float
    noise: float
    generator: torch.Generator | None = None

    @torch.no_grad()
    def gather(self, parameters: Sequence[Tensor], sums: Sums) -> None:
        """Clip the gradient of one sample, add it to the sums, and let go of it."""
        found = [p.grad for p in parameters if p.grad is not None]
        for gradient in found:
            # What cannot be clipped must not be added: it would spoil all others, which tells.
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in found])
        scale = (self.clip / torch.linalg.vector_norm(norms)).clamp(max=1.0)
        for number, parameter in enumerate(parameters):
            own, sofar = parameter.grad, sums[number]
            if own is not None:
                own.mul_(scale)
                sums[number] = own if sofar is None else sofar.add_(own)
                parameter.grad = None

    @torch.no_grad()
    def finish(self, parameters: Sequence[Tensor], sums: Sums, samples: int) -> None:
        """Make the gradient of a batch out of the sums: noise on all, divided by the samples."""
        for number, parameter in enumerate(parameters):
            total = sums[number]
            # Also where no sample had a gradient: whether one had may depend on it.
            total = torch.zeros_like(parameter) if total is None else total
            noise = torch.empty_like(total)
            noise.normal_(0.0, self.noise * self.clip, generator=self.generator)
            parameter.grad = total.add_(noise).div_(samples)
            sums[number] = None


def make(recipe: Recipe, batches: torch.Generator, device: torch.device) -> PerSample | None:
    """Return what a stage's gradients are hidden by; None if they are not.

    Args:
        recipe: How devices train.
        batches: The device's generator in this round, from which a simulation's noise follows.
        device: Where it trains.
    """
    if recipe.sample_clip is None or recipe.sample_noise is None:
        return None
    if recipe.sample_seed is None:
        seed = secrets.randbits(63)
    else:
        drawn = int(torch.randint(2**62, (), generator=batches))
        seed = rng.derive(recipe.sample_seed, "sample noise", drawn)
    generator = torch.Generator(device).manual_seed(seed)
    return PerSample(recipe.sample_clip, recipe.sample_noise, generator)
