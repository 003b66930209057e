import pytest
import torch
from torch import nn

from sizewise.errors import ModelError
from sizewise.models import build
from sizewise.surgery.anatomy import Staged, anatomy, hidden_shapes
from sizewise.surgery.dropping import drop_blocks, stages

IMAGE = (1, 8, 8)


@pytest.mark.parametrize("name", ["resnet14", "preresnet14", "vit", "wide_resnet101_2"])
def test_a_dropped_block_is_its_shortcut(name: str) -> None:
    """What the public code computes: the branch, times 0."""
    model = build(name, classes=3, image=IMAGE, width=0.25).eval()
    parts, x = anatomy(model), torch.randn(2, *IMAGE)
    shapes = hidden_shapes(model, parts, torch.zeros(2, *IMAGE))
    kept = [number for number in range(len(parts.blocks)) if number % 3]
    expected = build(name, classes=3, image=IMAGE, width=0.25).eval()
    expected.load_state_dict(model.state_dict())
    for number, path in enumerate(parts.blocks):
        if number not in kept:
            for branch, part in expected.get_submodule(path).named_modules():
                if branch.rpartition(".")[2].startswith("branch"):
                    part.register_forward_hook(lambda *_: torch.zeros(()))
    before = sum(parameter.numel() for parameter in model.parameters())
    small = drop_blocks(model, parts, shapes, kept)
    assert torch.equal(small(x), expected(x))
    assert sum(parameter.numel() for parameter in small.parameters()) < before
    assert set(small.state_dict()) < set(expected.state_dict())
    assert hidden_shapes(small, parts, torch.zeros(2, *IMAGE)) == shapes


def test_a_projection_stays_and_the_rest_goes() -> None:
    model = build("resnet8", classes=3, image=IMAGE)
    parts = anatomy(model)
    shapes = hidden_shapes(model, parts, torch.zeros(2, *IMAGE))
    drop_blocks(model, parts, shapes, kept=[0])
    left = {name.split(".")[2] for name, _ in model.blocks.named_parameters() if name[0] != "0"}  # type: ignore[union-attr]
    names = {name for name, _ in model.named_parameters() if not name.startswith("blocks.0.")}
    assert left
    assert all("projection" in name for name in names if name.startswith("blocks."))
    assert "blocks.1.projection.conv.weight" in names


def test_blocks_that_change_the_shape_without_a_shortcut_stay() -> None:
    model = Staged(nn.Flatten(), [nn.Linear(64, 8), nn.Linear(8, 8)], nn.Linear(8, 3))
    parts = anatomy(model)
    shapes = hidden_shapes(model, parts, torch.zeros(2, *IMAGE))
    with pytest.raises(ModelError, match=r"'blocks.0' changes the shape .* a method `dropped`"):
        drop_blocks(model, parts, shapes, kept=[1])
    assert drop_blocks(model, parts, shapes, kept=[0])(torch.zeros(2, *IMAGE)).shape == (2, 3)


def test_stages_begin_where_the_shape_changes() -> None:
    shapes = [torch.Size(shape) for shape in ((4, 8), (4, 8), (4, 8), (8, 4), (8, 4), (16, 2))]
    assert stages(shapes) == [range(2), range(2, 4), range(4, 5)]
    first = [torch.Size(shape) for shape in ((3,), (5,), (5,))]
    assert stages(first) == [range(2)]
