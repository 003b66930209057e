"""Small models with the same stem and head, and one with another head."""

from collections.abc import Sequence

from torch import nn

from sizewise.surgery.anatomy import Staged


def _build(image: tuple[int, int, int], classes: int, layers: Sequence[int], norm: bool) -> Staged:
    pixels = image[0] * image[1] * image[2]
    blocks = []
    for inputs, outputs in zip((6, *layers), (*layers, 5), strict=True):
        between = [nn.BatchNorm1d(outputs)] if norm else []
        blocks.append(nn.Sequential(nn.Linear(inputs, outputs), *between, nn.Tanh()))
    return Staged(nn.Sequential(nn.Flatten(), nn.Linear(pixels, 6)), blocks, nn.Linear(5, classes))


def shallow(classes: int, image: tuple[int, int, int], norm: bool = True) -> Staged:
    """One block."""
    return _build(image, classes, (), norm)


def deep(classes: int, image: tuple[int, int, int], norm: bool = True) -> Staged:
    """Three blocks."""
    return _build(image, classes, (9, 7), norm)


def partly_frozen(classes: int, image: tuple[int, int, int], norm: bool = True) -> Staged:
    """Three blocks, the first of which is its owner's."""
    model = deep(classes, image, norm)
    model.blocks[0].requires_grad_(False)
    return model


def other(classes: int, image: tuple[int, int, int], norm: bool = True) -> Staged:
    """A stem that gives more."""
    model = _build(image, classes, (), norm)
    model.stem[1] = nn.Linear(model.stem[1].in_features, 8)  # type: ignore[operator, index, union-attr]
    model.blocks[0][0] = nn.Linear(8, 5)  # type: ignore[operator]
    return model
