import pytest
import torch
from torch import Tensor, nn

from in_place_cases import BLOCKS, Layerless, Residual, Stages, Tokens
from sizewise.errors import ModelError
from sizewise.models import build
from sizewise.surgery.anatomy import Anatomy, Staged
from sizewise.surgery.in_place import InPlace
from sizewise.surgery.taking_apart import taken_apart

IMAGE = (1, 8, 8)


def blocks_of(model: nn.Module, **given: str) -> tuple[str, ...]:
    return taken_apart(model, torch.randn(2, *IMAGE), **given).blocks


def test_layers_of_a_library_are_found_behind_its_wrapping() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tokens(classes=3, image=IMAGE)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.model(x * 2)
            return out

    expected = tuple(f"encoder.layer.{number}" for number in range(BLOCKS))
    assert blocks_of(Tokens(classes=3, image=IMAGE)) == expected
    assert blocks_of(Wrapped()) == tuple(f"model.{path}" for path in expected)


def test_stages_are_looked_into_and_residual_blocks_are_not() -> None:
    expected = tuple(f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1))
    assert blocks_of(Stages(classes=3, image=IMAGE)) == expected


def test_paths_correct_what_is_found() -> None:
    model = Stages(classes=3, image=IMAGE)
    assert blocks_of(model, blocks="stages") == ("stages.0", "stages.1")
    with pytest.raises(ModelError, match="expected the blocks of Stages at 'layers'"):
        blocks_of(model, blocks="layers")
    with pytest.raises(ModelError, match="expected the stem of Stages at 'entry'"):
        blocks_of(model, stem="entry")
    model.unused = Residual(4)
    with pytest.raises(ModelError, match="'unused' is not called when Stages runs"):
        blocks_of(model, blocks="unused")


def test_a_model_without_blocks_says_so() -> None:
    with pytest.raises(ModelError, match="no blocks were found in Layerless"):
        blocks_of(Layerless(classes=3, image=IMAGE))


def test_plain_layers_are_blocks_where_there_is_nothing_else() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                *(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU()),
                *(nn.Conv2d(4, 6, 3), nn.ReLU()),
            )
            self.classifier = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
            return logits

    assert blocks_of(Plain()) == ("features.2", "features.4")


def test_a_chain_stays_a_chain() -> None:
    model = build("preresnet8", classes=3, image=IMAGE)
    parts = taken_apart(model, torch.randn(2, *IMAGE))
    assert type(parts) is Anatomy
    assert parts.blocks == ("blocks.0", "blocks.1", "blocks.2")


def test_named_parts_that_are_no_chain_are_run_in_place() -> None:
    class Pooling(Staged):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x).tanh()
            logits: Tensor = self.head(x.mean((2, 3)))
            return logits

    model = Pooling(nn.Conv2d(1, 4, 3), [Residual(4), Residual(4)], nn.Linear(4, 3))
    parts = taken_apart(model, torch.randn(2, *IMAGE))
    assert isinstance(parts, InPlace)
    assert parts.blocks == ("blocks.0", "blocks.1")


def test_looking_changes_nothing() -> None:
    model = Stages(classes=3, image=IMAGE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    blocks_of(model)
    torch.set_rng_state(state)
    assert model.training
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(module._forward_hooks for module in model.modules())
