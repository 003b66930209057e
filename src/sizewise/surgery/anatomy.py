"""A model seen as a stem, blocks in order, and a head.

Block-wise training, dropped blocks and early heads all need to know where a model can be taken
apart. The models in `sizewise.models` are `Staged`; `anatomy` finds the same three parts in a
`nn.Sequential`, in any module with the attributes `stem`, `blocks` and `head`, and in any other
model once its owner has named them:

    parts = anatomy(model, stem="embed", blocks="encoder.layers", head="classifier")
    parts.part_of("encoder.layers.3.mlp.weight")  # 3
    features = parts.run_blocks(model, parts.run_stem(model, x), stop=4)
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError

Part = Literal["stem", "head"] | int


class Staged(nn.Module):
    """A chain: the stem, each block in turn, the head.

    Attributes:
        stem: Turns an input batch into the first hidden tensor.
        blocks: Each maps a hidden tensor to the next.
        head: Turns the last hidden tensor into logits, shape (batch, classes).
    """

    def __init__(self, stem: nn.Module, blocks: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for an input batch."""
        x = self.stem(x)
        # A loop, because a container's __call__ would keep its input alive until its last block
        # is done: one activation more than a device needs.
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Anatomy:
    """Where a model's parts are, as dotted paths of its modules.

    Attributes:
        stem: Modules of the stem, in the order they run.
        blocks: One module per block, in the order they run.
        head: Modules of the head, in the order they run.
    """

    stem: tuple[str, ...]
    blocks: tuple[str, ...]
    head: tuple[str, ...]

    def part_of(self, tensor_name: str) -> Part:
        """Return the part that owns a parameter or buffer: "stem", a block's index, or "head".

        Raises:
            ModelError: No part owns it.
        """
        if any(_within(tensor_name, path) for path in self.stem):
            return "stem"
        if any(_within(tensor_name, path) for path in self.head):
            return "head"
        for index, path in enumerate(self.blocks):
            if _within(tensor_name, path):
                return index
        raise ModelError(
            f"the tensor {tensor_name!r} is in neither stem, blocks nor head; "
            "add it, or the module that holds it, to one of them"
        )

    def run_stem(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the first hidden tensor for an input batch."""
        return _run(model, self.stem, x)

    def run_blocks(
        self, model: nn.Module, x: Tensor, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return the hidden tensor after blocks start, ..., stop - 1, given that before them."""
        return _run(model, self.blocks[start:stop], x)

    def run_head(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for the last hidden tensor."""
        return _run(model, self.head, x)

    def check(self, model: nn.Module, x: Tensor) -> None:
        """Make sure that the parts, run one after another, are the model.

        Paths tell where the modules are, not what `forward` does between them: a flatten or a
        skip over several blocks would be lost in silence. The model is left as it was.

        Raises:
            ModelError: The parts cannot be run, or give another result than the model.
        """
        trouble = self.trouble(model, x)
        if trouble is not None:
            raise ModelError(
                f"stem, blocks and head of {type(model).__name__}, one after another, {trouble}; "
                "move what its forward does between them into modules"
            )

    def trouble(self, model: nn.Module, x: Tensor) -> str | None:
        """Return why the parts, run one after another, are not the model; None if they are."""
        model = copy.deepcopy(model).eval()
        with torch.no_grad():
            expected = model(x)
            try:
                hidden = self.run_blocks(model, self.run_stem(model, x))
                same = torch.equal(self.run_head(model, hidden), expected)
            except (RuntimeError, TypeError, ValueError, AttributeError, ModelError) as error:
                return f"cannot be run ({str(error).partition(chr(10))[0]})"
        return None if same else "give another result than the model"

    def owned(self, block: int) -> tuple[str, ...]:
        """Return the paths of what belongs to a block."""
        return (self.blocks[block],)

    def in_turn(self, what: str) -> "Anatomy":
        """Return the parts for something that runs them one after another."""
        return self


def anatomy(
    model: nn.Module,
    stem: str | Sequence[str] | None = None,
    blocks: str | Sequence[str] | None = None,
    head: str | Sequence[str] | None = None,
) -> Anatomy:
    """Find the stem, blocks and head of a model.

    Without paths they are the model's attributes `stem`, `blocks` and `head`. A `nn.Sequential`
    without these names is taken apart into its first child, the children between, and its last
    child with parameters together with what follows.

    Args:
        model: Any module.
        stem: Dotted path or paths of the stem; default: the model's `stem`.
        blocks: Dotted path of the list that holds the blocks, or the path of every block (a
            `nn.ModuleList` among them stands for its items); default: the model's `blocks`.
        head: Dotted path or paths of the head; default: the model's `head`.

    Raises:
        ModelError: A part is missing, parts overlap, or a parameter is in none of them.
    """
    named = {"stem", "blocks", "head"}.issubset(_children(model))
    if isinstance(model, nn.Sequential) and not named and stem is blocks is head is None:
        found = _sequential_anatomy(model)
    else:
        found = Anatomy(
            stem=paths_of(model, "stem", stem),
            blocks=block_paths(model, blocks),
            head=paths_of(model, "head", head),
        )
    for inner, outer in permutations((*found.stem, *found.blocks, *found.head), 2):
        if _within(inner, outer):
            raise ModelError(f"{inner!r} is in two parts of the model; name it in one of them only")
    for name, _ in model.named_parameters(remove_duplicate=False):
        found.part_of(name)
    return found


def _sequential_anatomy(model: nn.Sequential) -> Anatomy:
    names = _children(model)
    trained = [i for i, child in enumerate(model) if any(True for _ in child.parameters())]
    if not trained:
        raise ModelError("a sequential model needs a child with parameters as its head; none came")
    last = trained[-1]
    return Anatomy(tuple(names[: min(last, 1)]), tuple(names[1:last]), tuple(names[last:]))


def paths_of(model: nn.Module, part: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the paths of one part, each of which is known to exist in the model."""
    paths = (part,) if given is None else (given,) if isinstance(given, str) else tuple(given)
    # Bare tensors count too: a class token is often a parameter of the model itself.
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path in paths:
        if path not in known:
            raise ModelError(
                f"expected the {part} of {type(model).__name__} at {path!r}, where it has nothing; "
                'name its parts, as in stem="embed", blocks="encoder.layers", head="classifier"'
            )
    return paths


def block_paths(model: nn.Module, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the path of every block, given those that `anatomy` takes."""
    paths = paths_of(model, "blocks", given)
    # One Sequential alone is a list of blocks; one among several paths is a block itself.
    lists = (nn.ModuleList, nn.Sequential) if len(paths) == 1 else (nn.ModuleList,)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: list[str] = []
    for path in paths:
        module = modules.get(path)
        if isinstance(module, lists):
            found += [f"{path}.{name}" for name in _children(module)]
        else:
            found.append(path)
    return tuple(found)


def _children(module: nn.Module) -> list[str]:
    # Not named_children(), which names a child that stands in two places only once.
    names = (name for name, _ in module.named_modules(remove_duplicate=False))
    return [name for name in names if name and "." not in name]


def _within(name: str, path: str) -> bool:
    # With the dot: "blocks.1" does not hold the tensors of "blocks.10".
    return name == path or name.startswith(f"{path}.")


def _run(model: nn.Module, paths: tuple[str, ...], x: Tensor) -> Tensor:
    for path in paths:
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise ModelError(
                f"{path!r} is a bare tensor of {type(model).__name__}, so its part cannot be run "
                "on its own; put it in a module"
            ) from error
        x = module(x)
    return x


def hidden_shapes(model: nn.Module, parts: Anatomy, inputs: Tensor) -> tuple[torch.Size, ...]:
    """Return the shape of one sample's hidden tensor after the stem and after each block.

    The model is in evaluation mode, and gets some samples, (B, ...).
    """
    with torch.no_grad():
        x = parts.run_stem(model, inputs)
        shapes = [x.shape[1:]]
        for number in range(len(parts.blocks)):
            x = parts.run_blocks(model, x, number, number + 1)
            shapes.append(x.shape[1:])
    return tuple(shapes)
