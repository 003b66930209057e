import copy

import pytest
import torch
from torch import nn

from sizewise.errors import ModelError
from sizewise.models import build
from sizewise.surgery.anatomy import Staged, anatomy
from sizewise.surgery.step_sizes import StepSize, add_step_sizes

IMAGE = (1, 8, 8)


def sizes(model: nn.Module) -> list[float]:
    return [part.size.item() for part in model.modules() if isinstance(part, StepSize)]


@pytest.mark.parametrize(("name", "each"), [("resnet14", 1), ("preresnet14", 1), ("vit", 2)])
def test_steps_of_one_change_nothing_and_learn(name: str, each: int) -> None:
    model = build(name, classes=3, image=IMAGE).eval()
    parts, x = anatomy(model), torch.randn(4, *IMAGE)
    stepped = add_step_sizes(
        copy.deepcopy(model), parts, range(len(parts.blocks)), absorb=False, learns=True
    )
    assert torch.equal(stepped(x), model(x))
    assert len(sizes(stepped)) == each * len(parts.blocks)
    stepped.train()(x).square().sum().backward()
    gradients = [part.size.grad for part in stepped.modules() if isinstance(part, StepSize)]
    assert all(gradient is not None and gradient != 0 for gradient in gradients)


def test_the_step_multiplies_the_branch() -> None:
    model = build("resnet8", classes=3, image=IMAGE).eval()
    parts, x = anatomy(model), torch.randn(2, 16, 8, 8)
    stepped = add_step_sizes(copy.deepcopy(model), parts, range(3), absorb=False, learns=True)
    block = model.blocks[0]  # type: ignore[index]
    with torch.no_grad():
        stepped.blocks[0].branch.size.fill_(0.25)  # type: ignore[index, union-attr]
        branch = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(x)))))
        assert torch.equal(stepped.blocks[0](x), torch.relu(x + 0.25 * branch))  # type: ignore[index]


def test_steps_absorb_the_blocks_that_follow_a_gap() -> None:
    """A step is 1 plus the number of blocks dropped after it, also across stages."""
    model = build("resnet20", classes=3, image=IMAGE)
    parts = anatomy(model)
    stepped = add_step_sizes(model, parts, [1, 2, 5, 6], absorb=True, learns=False)
    assert sizes(stepped) == [1, 3, 1, 3]
    assert not any("branch" in name for name in stepped.state_dict())


def test_a_block_without_a_mark_steps_by_what_it_changes() -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 6)]
    model = Staged(nn.Flatten(), copy.deepcopy(blocks), nn.Linear(6, 2))
    stepped = add_step_sizes(model, anatomy(model), [0, 1], absorb=False, learns=True)
    with torch.no_grad():
        for part in stepped.modules():
            if isinstance(part, StepSize):
                part.size.fill_(0.5)
    x = torch.randn(3, 4)
    hidden = (x + blocks[0](x)) / 2
    expected = stepped.head(blocks[1](hidden) / 2)
    assert torch.allclose(stepped(x), expected, atol=1e-6)
    assert set(stepped.state_dict()) > {"blocks.0.weight", "blocks.0.step_size.size"}


def test_a_name_that_is_taken_is_not_overwritten() -> None:
    class Block(nn.Linear):
        step_size = 3

    model = Staged(nn.Flatten(), [Block(4, 4)], nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"'blocks.0' already has something called 'step_size'"):
        add_step_sizes(model, anatomy(model), [0], absorb=False, learns=True)


def test_a_block_of_ones_own_may_have_a_branch() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(x)  # type: ignore[no-any-return]

    model = Staged(nn.Flatten(), [Block()], nn.Linear(4, 2))
    stepped = add_step_sizes(copy.deepcopy(model), anatomy(model), [0], absorb=False, learns=True)
    x = torch.randn(3, 4)
    assert torch.allclose(stepped(x), model(x), atol=1e-6)
    assert "blocks.0.branch.weight" in stepped.state_dict()


def test_a_block_in_several_places_has_one_step_size() -> None:
    block = nn.Linear(4, 4)
    model = Staged(nn.Flatten(), [block, block], nn.Linear(4, 2))
    stepped = add_step_sizes(model, anatomy(model), [0, 1], absorb=False, learns=True)
    assert len(sizes(stepped)) == 1
    assert len(block._forward_hooks) == 1
