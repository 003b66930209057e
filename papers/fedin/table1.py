"""FedIN, Table I: the five architectures, their parameters and MACs, and the bytes they need.

    python papers/fedin/table1.py [--scale paper]

Writes `table1.SCALE.md`. Bytes are the predicted peak of one step of Adam: of local training, and
of local and IN training by each rule, with a batch of other devices' features held. Nothing is
trained. Paper: 64 channels, images of 32 pixels, batch 64; mini: 16 channels, 16 pixels.
"""

from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from shared import common, inside
from sizewise.methods.fedin import FedIN
from sizewise.models.fedin import REPEATS
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

BASE = {"smoke": 4, "mini": 16, "paper": 64}
IMAGE = {"smoke": (3, 8, 8), "mini": (3, 16, 16), "paper": (3, 32, 32)}
CLIENTS = {"a": 2, "b": 1, "c": 2, "d": 2, "e": 3}

Rule = Literal["none", "sum", "projection", "sequential"]
RULES: tuple[Rule, ...] = ("none", "sum", "projection", "sequential")


def method(scale: str, letter: str, rule: Rule) -> FedIN:
    """Return FedIN with one architecture."""
    recipe = Recipe(optimizer="adam", lr=1e-3, weight_decay=0.0, batch=64, norm="tracked")
    model = ModelConfig(f"fedin_{letter}", {"base": BASE[scale]})
    return FedIN(Task(model, recipe, IMAGE[scale], classes=10), FedIN.Options(rule=rule))


def main() -> None:
    """Count, and write the table."""
    scale = common.scale(__doc__, "paper")
    heads = ["model", "repeats", "devices", "parameters", "of them shared", "MMAC a sample"]
    heads += [f"peak MB, {'local' if rule == 'none' else rule}" for rule in RULES]
    heads += ["features a round, MB each way"]
    lines = common.table(*heads)
    for letter, repeats in list(REPEATS.items())[: 1 if scale == common.SMOKE else None]:
        methods = {rule: method(scale, letter, rule) for rule in RULES}
        model, shared_names = inside.model_and_ends(methods["sum"])
        parameters = dict(model.named_parameters())
        ends = sum(p.numel() for n, p in parameters.items() if n in shared_names)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(torch.zeros(1, *IMAGE[scale]))
        found = {rule: inside.peak_and_features(one, 64) for rule, one in methods.items()}
        cells = [letter.upper(), str(repeats), str(CLIENTS[letter])]
        cells += [f"{sum(p.numel() for p in parameters.values()):,}", f"{ends:,}"]
        cells += [f"{counter.get_total_flops() / 2e6:,.1f}"]
        cells += [f"{found[rule][0] / 1e6:,.1f}" for rule in RULES]
        cells += [f"{found['sum'][1] / 1e6:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
