"""FeDepth, Figure 7: which labels the devices hold under each partition.

    python papers/fedepth/fig7_labels.py [--scale mini]

Writes `fig7_labels.SCALE.svg`, CIFAR-10's labels of five devices as bubbles, and `.md`, the sizes
of all shards and how far their deviation ranges over ten seeds. Balanced (alpha) and unbalanced
(alpha_u) Dirichlet, as in the paper, and beyond it the two and five classes per device of Table 2.
Mini: 10,000 samples and 40 devices, as in the suites; paper: 50,000 and 100. The paper keeps 20 %
of every shard for validation, which we do not, so its deviations compare with 80 % of ours.
"""

from functools import partial
from typing import Any

from matplotlib import pyplot

from shared import common
from sizewise.data import partitions, sources

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "alpha(0.3)": ("balanced-dirichlet", {"alpha": 0.3}),
    "alpha(1.0)": ("balanced-dirichlet", {"alpha": 1.0}),
    "beta(2)": ("deck", {"classes_per_device": 2}),
    "alpha_u(0.3)": ("capped-dirichlet", {"alpha": 0.3, "min_samples": 50}),
    "alpha_u(1.0)": ("capped-dirichlet", {"alpha": 1.0, "min_samples": 50}),
    "beta(5)": ("deck", {"classes_per_device": 5}),
}
PUBLISHED = {"alpha_u(0.3)": "150.6", "alpha_u(1.0)": "77.4"}
DATA = {"smoke": "digits", "mini": "cifar10", "paper": "cifar10"}
DEVICES = {"smoke": 10, "mini": 40, "paper": 100}
LIMIT = {"smoke": None, "mini": 10_000, "paper": None}
SHOWN = 5
SEEDS = 10


def main() -> None:
    """Draw the figure and write the sizes."""
    scale = common.scale(__doc__, "mini")
    data = sources.load(DATA[scale], None, train_limit=LIMIT[scale])
    labels, classes = data.train_labels, data.classes
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5.5), layout="constrained", sharex=True)
    heads = ("partition", "classes a device", "samples a device", "80 % of the deviation")
    lines = common.table(*heads, "published")
    for (name, (scheme, options)), axes in zip(SETTINGS.items(), panels.flat, strict=True):
        deal = partial(partitions.make, scheme, labels, classes, DEVICES[scale], **options)
        dealt = deal(seed=0)
        counts = dealt.histogram(labels, classes).numpy()
        shown = counts[:SHOWN]
        device, label = shown.nonzero()
        bubbles = 260 * shown[device, label] / shown.max()
        axes.scatter(label, device + 1, bubbles, color="#4477aa", linewidths=0)
        axes.set_title(f"{name}: largest {shown.max()}")
        axes.set_xticks(range(classes))
        axes.set_yticks(range(1, SHOWN + 1))
        axes.set_xlabel("class")
        axes.set_ylabel("device")
        axes.margins(0.12)
        common.plain(axes)
        sizes, held = counts.sum(1), (counts > 0).sum(1)
        spread = [0.8 * float(deal(seed=seed).sizes().double().std()) for seed in range(SEEDS)]
        paper = PUBLISHED.get(name, "-") if scale == "paper" else "-"
        lines.append(
            f"| {name} | {held.mean():.1f} | {sizes.mean():.1f} ± {sizes.std():.1f} "
            f"| {min(spread):.1f} to {max(spread):.1f} | {paper} |"
        )
    common.save(figure, common.target(__file__, scale, "svg"))
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
