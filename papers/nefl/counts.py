"""NeFL, Table 8: parameters and FLOPs of every published submodel, and the bytes of training it.

    python papers/nefl/counts.py [--only MODEL ...] [--smoke]

Writes `counts.paper.md`: for each network and way of scaling, each submodel's parameters, their
share of the network's, the share that its table states (gamma_W times gamma_D), the FLOPs of
training on one sample, and the predicted peak of a training step of SGD at batch 32. Step sizes,
one or two for each block, are counted as well. Nothing is trained. ResNets have images of 32
pixels, ViT-B/16 of 224. Wide-ResNet-101-2 has ImageNet's stem; its images are taken to be of 224
pixels too.
"""

import time

from shared import common, inside
from sizewise.methods.nefl import NeFL
from sizewise.methods.nefl import scaling as submodels
from sizewise.methods.nefl.scaling import Scaling
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
PLAIN: dict[str, object] = {"projection": 1, "global_pool": True}

MODELS: dict[str, tuple[str, tuple[int, int, int], dict[str, object]]] = {
    "resnet18": ("ResNet-18", CIFAR, {}),
    "resnet34": ("ResNet-34", CIFAR, {}),
    "resnet56": ("ResNet-56", CIFAR, PLAIN),
    "resnet110": ("ResNet-110", CIFAR, PLAIN),
    "vit_base": ("ViT-B/16", IMAGENET, {}),
    "wide_resnet101_2": ("Wide-ResNet-101-2", IMAGENET, {}),
}

# Shares of the parameters, gamma_W times gamma_D, where they are published.
FIFTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
STATED: dict[tuple[str, Scaling], tuple[float, ...]] = {
    ("resnet18", "width"): FIFTHS,
    ("resnet18", "depth"): (0.20, 0.39, 0.57, 0.81, 1),
    ("resnet18", "both"): (0.34 * 0.58, 0.4, 0.6, 0.8, 1),
    ("resnet34", "width"): FIFTHS,
    ("resnet34", "depth"): (0.23, 0.39, 0.61, 0.81, 1),
    ("resnet34", "both"): (0.378 * 0.53, 0.625 * 0.64, 0.771 * 0.78, 0.9 * 0.89, 1),
    ("resnet56", "width"): FIFTHS,
    ("resnet110", "width"): FIFTHS,
}
FAMILIES: dict[str, tuple[Scaling, ...]] = {
    "vit_base": ("depth", "both"),
    "wide_resnet101_2": ("depth",),
}
LETTERS: dict[Scaling, str] = {"width": "W", "depth": "D", "both": "WD"}


def rows(model: str, scalings: tuple[Scaling, ...]) -> list[str]:
    """Return the rows of one network, for each way of scaling."""
    label, image, args = MODELS[model]
    recipe = Recipe(batch=32, momentum=0.0, weight_decay=0.0, norm="tracked")
    method = NeFL(Task(ModelConfig(model, args), recipe, image, classes=10))
    whole = sum(parameter.numel() for parameter in inside.sketch(method).parameters())
    lines, known = [], {}
    for scaling in scalings:
        chosen = submodels.published(model, scaling)
        stated = STATED.get((model, scaling))
        for number, submodel in enumerate(chosen):
            if submodel not in known:
                module = inside.sketch(method, submodel)
                flops, peak = inside.flops_and_peak(method, module)
                size = sum(parameter.numel() for parameter in module.parameters())
                known[submodel] = size, flops // recipe.batch, peak
            parameters, work, peak = known[submodel]
            kept = len(method.task.parts.blocks if submodel.blocks is None else submodel.blocks)
            cells = (
                f"{label} {LETTERS[scaling]}{number + 1}",
                f"{submodel.width:.3f}",
                f"{kept}",
                f"{parameters:,}",
                f"{parameters / whole:.3f}",
                f"{stated[number]:.3f}" if stated else "",
                f"{work / 1e6:,.0f}",
                f"{peak / 1e6:,.1f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Count, and write the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, help="networks; default: all")
    common.add_smoke(parser)
    chosen = parser.parse_args()
    heads = ("submodel", "channels", "blocks", "parameters", "share", "stated")
    lines = common.table(*heads, "MFLOP a sample, training", "peak MB, batch 32")
    scalings = {model: FAMILIES.get(model, ("width", "depth", "both")) for model in MODELS}
    if chosen.smoke:
        scalings = {"resnet18": ("depth",)}
    for model in chosen.only or scalings:
        start = time.process_time()
        lines += rows(model, scalings[model])
        print(f"{model}: {time.process_time() - start:.0f} s of CPU", flush=True)
    if chosen.only:
        print("\n".join(lines))
    else:
        common.write(
            lines, common.target(__file__, common.SMOKE if chosen.smoke else "paper", "md")
        )


if __name__ == "__main__":
    main()
