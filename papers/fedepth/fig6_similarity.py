"""FeDepth, Figure 6: how alike the clients' layers are after local training.

    python papers/fedepth/fig6_similarity.py [--scale mini]

Every client trains a 14-layer ResNet (13 convolutions and a classifier) from the same weights on
its own two classes; the same test images then go through all of them. For each layer the outputs of
every pair of clients are compared: by linear CKA of whole feature maps (Kornblith et al.,
https://arxiv.org/abs/1905.00414), and by the mean canonical correlation (CCA) of channels, each
place of the map being an observation. Beyond the paper, the same with IID data. Of the first layer
CCA says nothing: 16 channels of a 3x3 patch span all of it, whatever they learned.

Writes `fig6_similarity.SCALE.svg` and `.md`. Mini: 6 clients, scikit-learn's digits; paper: 20
clients, MNIST from the Hugging Face hub.
"""

from collections.abc import Callable
from itertools import combinations
from statistics import fmean

import torch
from matplotlib import pyplot
from torch import Tensor, nn

from shared import common, inside
from sizewise import config
from sizewise.data.augment import Transform
from sizewise.runs import preparation

SCALES = {
    "smoke": ["data.name=digits", "fleet.devices=2", "data.train_limit=60", "data.test_limit=20"],
    "mini": ["data.name=digits", "data.image_size=16", "fleet.devices=6", "recipe.epochs=5"],
    "paper": ["data.name=mnist", "fleet.devices=20", "recipe.epochs=5", "data.test_limit=250"],
}
COMMON = [
    "model.name=resnet14",
    "method.name=fedavg",
    "fleet.budgets=[]",
    "fleet.per_round=1",
    "recipe.lr=0.05",
    "rounds=1",
]
SPLITS = {
    "two classes a client": ["data.partition=deck", "data.classes_per_device=2"],
    "IID": ["data.partition=iid"],
}


@torch.no_grad()
def features(module: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the outputs of all layers on the way to the logits, (n, channels, places)."""
    found: list[Tensor] = []

    def keep(layer: nn.Module, inputs: object, output: Tensor) -> None:
        found.append(output.flatten(2) if output.dim() > 2 else output.unsqueeze(2))

    layers = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear) and "projection" not in name
    ]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    module.eval()(images)
    for hook in hooks:
        hook.remove()
    return found


def cka(one: Tensor, other: Tensor) -> float:
    """Return the linear CKA of two layers' outputs (n, channels, places), in 0..1."""
    grams = [x.flatten(1) - x.flatten(1).mean(0) for x in (one, other)]
    first, second = (x @ x.T for x in grams)
    return float((first * second).sum() / (first.norm() * second.norm()))


def cca(one: Tensor, other: Tensor) -> float:
    """Return the mean canonical correlation of two layers' channels, in 0..1."""
    first, second = (x.transpose(1, 2).flatten(0, 1).double() for x in (one, other))
    first, second = first - first.mean(0), second - second.mean(0)
    between = whitener(first).T @ (first.T @ second) @ whitener(second)
    return float(torch.linalg.svdvals(between).clamp(max=1).mean())


def whitener(rows: Tensor) -> Tensor:
    """Return what makes columns (n, c) orthonormal: (c, rank)."""
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    kept = values > 1e-10 * values[-1]  # Channels that depend on others span nothing more.
    scaled: Tensor = vectors[:, kept] / values[kept].sqrt()
    return scaled


MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {"CKA": cka, "CCA": cca}


def similarities(settings: list[str]) -> dict[str, list[list[float]]]:
    """Return, for each measure and layer, the similarity of every pair of clients."""
    setting = preparation.prepare(config.load(None, [*COMMON, *settings]))
    data = setting.dataset
    images = Transform("none", data.mean, data.std)(data.test_inputs, None)
    outputs = [features(module, images) for module in inside.local_models(setting)]
    layers = list(zip(*outputs, strict=True))
    return {
        name: [[measure(*pair) for pair in combinations(layer, 2)] for layer in layers]
        for name, measure in MEASURES.items()
    }


def main() -> None:
    """Draw the figure and write its means."""
    scale = common.scale(__doc__, "mini")
    torch.set_num_threads(1)  # as in a run
    found = {name: similarities([*SCALES[scale], *split]) for name, split in SPLITS.items()}
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for measure, axes in zip(MEASURES, panels, strict=True):
        for colour, (split, values) in zip(common.COLOURS, found.items(), strict=False):
            layers = range(1, len(values[measure]) + 1)
            means = [fmean(pairs) for pairs in values[measure]]
            low, high = ([pick(pairs) for pairs in values[measure]] for pick in (min, max))
            axes.plot(layers, means, "o-", color=colour, ms=3, label=split)
            axes.fill_between(layers, low, high, color=colour, alpha=0.15, lw=0)
        axes.set_title(f"{measure} between clients: mean and range of pairs")
        axes.set_xlabel("layer; the last is the classifier")
        axes.set_xticks(layers)
        axes.set_ylim(0, 1.02)
        common.plain(axes)
    panels[0].legend(loc="lower left")
    common.save(figure, common.target(__file__, scale, "svg"))
    columns = [(split, measure) for measure in MEASURES for split in found]
    lines = common.table("layer", *(f"{measure}, {split}" for split, measure in columns))
    for layer in range(len(found["IID"]["CKA"])):
        means = [fmean(found[split][measure][layer]) for split, measure in columns]
        lines.append(f"| {layer + 1} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
