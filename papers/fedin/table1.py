"""FedIN, Table I: the five architectures, their parameters and MACs, and the bytes they need.

    python papers/fedin/table1.py [--scale paper]

Writes `table1.SCALE.md`. Bytes are the predicted peak of one step of Adam: of local training, and
of local and IN training by each rule, with a batch of other devices' features held. Nothing is
trained. Paper: 64 channels, images of 32 pixels, batch 64; mini: 16 channels, 16 pixels.
"""

import shared
import torch
from torch.utils.flop_counter import FlopCounterMode

from sizewise.exchange.view import size_in_bytes
from sizewise.fleet.devices import Device
from sizewise.methods.fedin import FedIN
from sizewise.models.fedin import REPEATS
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

BASE = {"mini": 16, "paper": 64}
IMAGE = {"mini": (3, 16, 16), "paper": (3, 32, 32)}
CLIENTS = {"a": 2, "b": 1, "c": 2, "d": 2, "e": 3}
RULES = ("none", "sum", "projection", "sequential")


def method(scale: str, letter: str, rule: str) -> FedIN:
    """Return FedIN with one architecture."""
    recipe = Recipe(optimizer="adam", lr=1e-3, weight_decay=0.0, batch=64, norm="tracked")
    model = ModelConfig(f"fedin_{letter}", {"base": BASE[scale]})
    return FedIN(Task(model, recipe, IMAGE[scale], classes=10), FedIN.Options(rule=rule))


def main() -> None:
    """Count, and write the table."""
    scale = shared.scale(__doc__, "paper")
    heads = ["model", "repeats", "devices", "parameters", "of them shared", "MMAC a sample"]
    heads += [f"peak MB, {'local' if rule == 'none' else rule}" for rule in RULES]
    heads += ["features a round, MB each way"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for letter, repeats in REPEATS.items():
        methods = {rule: method(scale, letter, rule) for rule in RULES}
        chosen = methods["sum"]
        model = chosen.pattern(chosen.main)
        parameters = dict(model.named_parameters())
        ends = sum(p.numel() for n, p in parameters.items() if n in chosen.view(chosen.main))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(torch.zeros(1, *IMAGE[scale]))
        state = chosen.setup()
        plans = {rule: one.plan_upper_bound(state, Device(0, "any"), 0) for rule, one in methods.items()}
        cells = [letter.upper(), str(repeats), str(CLIENTS[letter])]
        cells += [f"{sum(p.numel() for p in parameters.values()):,}", f"{ends:,}"]
        cells += [f"{counter.get_total_flops() / 2e6:,.1f}"]
        cells += [f"{(plans[rule].predicted or 0) / 1e6:,.1f}" for rule in RULES]
        cells += [f"{size_in_bytes(chosen.given(plans['sum'], 64)) / 1e6:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    shared.write(lines, shared.HERE / f"table1.{scale}.md")


if __name__ == "__main__":
    main()
