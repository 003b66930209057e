"""NeFL, appendix C: width-k submodels of a linear model against the best rank-k approximation.

    python papers/nefl/toy.py [--seeds N] [--start DEVIATION] [--smoke]

Y = W X, with W of rank 8 plus a little noise, is learned by U V of inner width 8. Submodel k is the
first k columns of U and rows of V, times a step size s_k that learns or is 1. By Eckart and Young
no submodel can have a smaller error than the first k singular values of Y leave over.

    a round:  every submodel takes 5 steps of gradient descent from the common U and V;
              each entry of U and V <- mean over the submodels that have it;  s_k is its own

Beside these: the full model alone, cut to its first k columns afterwards; and the same with the
step size that suits it best. Errors are |Y - s U V X|^2 / |Y|^2, means over the seeds. Writes
`toy.mini.md` and `toy.mini.svg`, or with another start prints the table; half a minute of a core.
"""

from pathlib import Path
from statistics import fmean

import torch
from matplotlib import pyplot
from torch import Tensor

from shared import common

OUTPUTS, INPUTS, SAMPLES, RANK = 24, 32, 128, 8
WIDTHS = (1, 2, 4, 6, 8)
NOISE, RATE, LOCAL_STEPS = 0.02, 0.1, 5
MARKS = (100, 1000)
"""Rounds after which errors are noted."""

Errors = dict[str, list[float]]
"""The error of each width, by what was trained and for how long."""


def problem(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return X (INPUTS, SAMPLES) and Y = W X (OUTPUTS, SAMPLES), both of spectral norm about 1."""
    left = torch.linalg.qr(torch.randn(OUTPUTS, RANK, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(INPUTS, RANK, generator=generator))[0]
    weights = left * torch.linspace(1, 0.3, RANK) @ right.T
    weights += NOISE * torch.randn(OUTPUTS, INPUTS, generator=generator)
    inputs = torch.randn(INPUTS, SAMPLES, generator=generator) / SAMPLES**0.5
    return inputs, weights @ inputs


def descend(
    left: Tensor, right: Tensor, step: Tensor, inputs: Tensor, outputs: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (OUTPUTS, k), V (k, INPUTS) and s after one device's steps."""
    for _ in range(LOCAL_STEPS):
        hidden = right @ inputs
        made = left @ hidden
        rest = RATE * (outputs - step * made)
        moved = left + step * rest @ hidden.T
        right = right + step * left.T @ rest @ inputs.T
        left, step = moved, step + (rest * made).sum() if learns else step
    return left, right, step


def train(
    inputs: Tensor,
    outputs: Tensor,
    start: tuple[Tensor, Tensor],
    widths: tuple[int, ...],
    learns: bool,
    marks: tuple[int, int],
) -> dict[int, tuple[Tensor, Tensor, dict[int, Tensor]]]:
    """Return U, V and the step sizes after some rounds, trained by submodels of these widths.

    Args:
        inputs: X.
        outputs: Y.
        start: U and V before the first round.
        widths: One submodel each.
        learns: Whether step sizes do.
        marks: After how many rounds to note them; the last one ends it.
    """
    left, right = start
    steps = {width: torch.ones(()) for width in widths}
    found = {}
    for done in range(1, marks[-1] + 1):
        sums, counts = [torch.zeros_like(left), torch.zeros_like(right)], torch.zeros(RANK)
        for width in widths:
            own = descend(left[:, :width], right[:width], steps[width], inputs, outputs, learns)
            sums[0][:, :width] += own[0]
            sums[1][:width] += own[1]
            counts[:width] += 1
            steps[width] = own[2]
        left, right = sums[0] / counts, sums[1] / counts[:, None]
        if done in marks:
            found[done] = left, right, dict(steps)
    return found


def error(left: Tensor, right: Tensor, step: Tensor, inputs: Tensor, outputs: Tensor) -> float:
    """Return what a submodel leaves over, as a share of Y."""
    rest = outputs - step * left @ right @ inputs
    return float(rest.square().sum() / outputs.square().sum())


def measure(seed: int, scale: float, marks: tuple[int, int]) -> tuple[Errors, Errors]:
    """Return the errors of one seed, and the step sizes learned."""
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = problem(generator)
    start = (
        scale * torch.randn(OUTPUTS, RANK, generator=generator),
        scale * torch.randn(RANK, INPUTS, generator=generator),
    )
    values = torch.linalg.svdvals(outputs).square()
    errors: Errors = {
        "best rank k": [float(values[width:].sum() / values.sum()) for width in WIDTHS]
    }
    sizes: Errors = {}
    for name, widths, learns in (
        ("nested, s = 1", WIDTHS, False),
        ("nested, s learns", WIDTHS, True),
        ("full alone, then cut", (RANK,), False),
    ):
        found = train(inputs, outputs, start, widths, learns, marks)
        for mark, (left, right, steps) in found.items():
            scores, fitted = [], []
            for width in WIDTHS:
                part = left[:, :width], right[:width]
                step = steps.get(width, torch.ones(()))
                scores.append(error(*part, step, inputs, outputs))
                made = part[0] @ part[1] @ inputs
                best = (made * outputs).sum() / made.square().sum()
                fitted.append(error(*part, best, inputs, outputs))
            errors[f"{name}, {mark} rounds"] = scores
            if learns:
                sizes[f"{mark} rounds"] = [float(steps[width]) for width in WIDTHS]
            if widths == (RANK,):
                errors[f"{name}, best s, {mark} rounds"] = fitted
    return errors, sizes


def averaged(found: list[Errors]) -> Errors:
    """Return the means over the seeds."""
    return {
        name: [fmean(values) for values in zip(*(one[name] for one in found), strict=True)]
        for name in found[0]
    }


def draw(errors: Errors, last: int, path: Path) -> None:
    """Draw the errors after the last round against the best."""
    figure, axes = pyplot.subplots(figsize=(5.5, 3.4), layout="constrained")
    names = [name for name in errors if name.endswith(f", {last} rounds")]
    for colour, name in zip(common.COLOURS, names, strict=False):
        label = name.removesuffix(f", {last} rounds")
        axes.plot(WIDTHS, errors[name], "o-", color=colour, ms=4, label=label)
    axes.plot(WIDTHS, errors["best rank k"], "k--", label="best rank k")
    axes.set_yscale("log")
    axes.set_xlabel("width k of the submodel")
    axes.set_ylabel("error, share of Y")
    axes.set_xticks(WIDTHS)
    common.plain(axes)
    axes.legend(loc="lower left")
    common.save(figure, path)


def main() -> None:
    """Train, draw, and write the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--start", type=float, default=0.1, help="deviation of the first weights")
    common.add_smoke(parser)
    chosen = parser.parse_args()
    seeds, marks, scale = (
        (1, (2, 10), common.SMOKE) if chosen.smoke else (chosen.seeds, MARKS, "mini")
    )
    torch.set_num_threads(1)
    found = [measure(seed, chosen.start, marks) for seed in range(seeds)]
    errors, sizes = (averaged([one[part] for one in found]) for part in (0, 1))
    heads = [f"k = {width}" for width in WIDTHS]
    lines = common.table("error, % of Y", *heads)
    for name, values in errors.items():
        lines.append(f"| {name} | {' | '.join(f'{100 * value:.2f}' for value in values)} |")
    lines += ["", *common.table("s_k that was learned", *heads)]
    for name, values in sizes.items():
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")
    if chosen.start == parser.get_default("start"):
        draw(errors, marks[-1], common.target(__file__, scale, "svg"))
        common.write(lines, common.target(__file__, scale, "md"))
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
