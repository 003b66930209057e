"""The smallest budget at which each method can train a model, with and without levers.

    python benchmarks/smallest.py [--models NAME...] [--methods NAME...] [--smoke]

Batch 32, momentum; images of 32x32 and ten classes, or texts of 64 tokens. Nothing is trained: a
device of one byte is refused, and the refusal says what would do. That is the least that a method
has any use for: the narrowest width, the cheapest block, the shallowest depth.
"""

from collections.abc import Iterator
from dataclasses import replace

import common
from sizewise.errors import BudgetTooSmall, SizewiseError
from sizewise.fleet.devices import Device
from sizewise.methods import find
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

RECIPE = Recipe(batch=32)
IMAGES = {"input_shape": (3, 32, 32), "classes": 10}
TEXTS = {"input_shape": (64,), "classes": 2, "vocabulary": 30522}
MODELS = {
    "PreResNet-20": Task(ModelConfig("preresnet20"), RECIPE, **IMAGES),  # type: ignore[arg-type]
    "ResNet-18": Task(ModelConfig("resnet18"), RECIPE, **IMAGES),  # type: ignore[arg-type]
    "ViT-Tiny": Task(
        ModelConfig("vit", {"dim": 192, "heads": 3, "depth": 12, "patch": 4}),
        RECIPE,
        **IMAGES,  # type: ignore[arg-type]
    ),
    "MiniLM": Task(
        ModelConfig("encoder", {"layers": 6, "hidden": 384, "heads": 12, "inner": 1536}),
        RECIPE,
        **TEXTS,  # type: ignore[arg-type]
    ),
}
METHODS: tuple[str, ...] = (
    *("fedavg", "small", "heterofl", "fjord", "fedrolex", "splitmix"),
    *("fedepth", "m-fedepth", "depthfl", "inclusivefl", "nefl", "slt"),
)


def least(method: str, task: Task) -> int | None:
    """Return the fewest bytes that a method can use; None if it does not take the model."""
    kind = find(method)
    recipe = replace(task.recipe, **kind.recipe_defaults)
    try:
        made = kind(replace(task, recipe=recipe, budgets=(1,)))
        made.plan(made.setup(), Device(0, "any", 1), 0)
    except BudgetTooSmall as error:
        return error.needed
    except SizewiseError:
        return None
    return None


def rows(models: dict[str, Task], methods: tuple[str, ...]) -> Iterator[str]:
    """Yield the table, a row for each method."""
    yield f"| MB | {' | '.join(f'{name} | with levers' for name in models)} |"
    yield "|" + "---|" * (1 + 2 * len(models))
    for method in methods:
        cells = []
        for task in models.values():
            for levers in ("none", "auto"):
                recipe = replace(task.recipe, levers=(levers,))
                found = least(method, replace(task, recipe=recipe))
                cells.append("no" if found is None else f"{found / 1e6:.2f}")
        yield f"| {method} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="*", default=METHODS)
    chosen = parser.parse_args()
    models, methods = {name: MODELS[name] for name in chosen.models}, tuple(chosen.methods)
    if chosen.smoke:
        models, methods = {"PreResNet-20": MODELS["PreResNet-20"]}, ("fedavg", "small", "fedepth")
    for line in rows(models, methods):
        print(line, flush=True)


if __name__ == "__main__":
    main()
