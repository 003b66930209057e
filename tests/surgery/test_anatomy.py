import pytest
import torch
from torch import Tensor, nn

from sizewise.errors import ModelError
from sizewise.models import build, catalogue
from sizewise.surgery.anatomy import Anatomy, Staged, anatomy


class Encoder(nn.Module):
    """A user's model: other names, nested modules, and a flatten inside forward when asked."""

    def __init__(self, squash: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(12))
        self.norm = nn.LayerNorm(6)
        self.classifier = nn.Linear(6, 3)
        self.squash = squash

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.classifier(torch.tanh(self.norm(x)) if self.squash else self.norm(x))


PATHS = {"stem": "embed", "blocks": "encoder.layers", "head": ["norm", "classifier"]}


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "encoder"])
def test_parts_are_the_model_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    width = 0.125 if name in ("wide_resnet101_2", "vit_base") else 1.0
    model = build(name, classes=10, image=(1, 8, 8), width=width)
    x = torch.randn(4, 1, 8, 8)
    parts = anatomy(model)
    assert len(parts.blocks) == len(model.blocks)
    middle = len(parts.blocks) // 2
    with torch.no_grad():
        expected = model(x)  # in training mode, where norms depend on nothing but the batch
        hidden = parts.run_stem(model, x)
        hidden = parts.run_blocks(model, hidden, stop=middle)
        hidden = parts.run_blocks(model, hidden, start=middle)
        assert torch.equal(parts.run_head(model, hidden), expected)


def test_staged_names() -> None:
    model = Staged(nn.Flatten(), [nn.Linear(4, 4), nn.Linear(4, 4)], nn.Linear(4, 2))
    assert anatomy(model) == Anatomy(("stem",), ("blocks.0", "blocks.1"), ("head",))


def test_attributes_of_any_module_are_enough() -> None:
    class Duck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.stem = nn.Linear(3, 4)

    assert anatomy(Duck()) == Anatomy(("stem",), ("blocks.0", "blocks.1"), ("head",))


def test_sequential() -> None:
    relu = nn.ReLU()  # used twice: its second place must not be lost
    model = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 2), nn.Tanh())
    parts = anatomy(model)
    assert parts == Anatomy(("0",), ("1", "2", "3"), ("4", "5"))
    parts.check(model, torch.randn(3, 4))


def test_short_and_empty_sequentials() -> None:
    assert anatomy(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))) == Anatomy(("0",), (), ("1",))
    assert anatomy(nn.Sequential(nn.Linear(4, 2))) == Anatomy((), (), ("0",))
    with pytest.raises(ModelError, match="needs a child with parameters"):
        anatomy(nn.Sequential(nn.Flatten()))


def test_paths_of_a_users_model() -> None:
    model = Encoder()
    parts = anatomy(model, **PATHS)
    assert parts.blocks == tuple(f"encoder.layers.{i}" for i in range(12))
    parts.check(model, torch.randn(2, 4))


def test_a_list_of_paths_names_each_block() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Linear(4, 4),
            "layer1": nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            "layer2": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            "out": nn.Linear(4, 2),
        }
    )
    parts = anatomy(model, stem="embed", blocks=["layer1", "layer2"], head="out")
    assert parts.blocks == ("layer1", "layer2.0", "layer2.1")


def test_part_of() -> None:
    parts = anatomy(Encoder(), **PATHS)
    assert parts.part_of("embed.weight") == "stem"
    assert parts.part_of("encoder.layers.1.bias") == 1
    assert parts.part_of("encoder.layers.11.bias") == 11
    assert parts.part_of("norm.weight") == "head"
    with pytest.raises(ModelError, match=r"'pooler\.weight' is in neither"):
        parts.part_of("pooler.weight")


def test_a_bare_parameter_belongs_to_a_part_but_cannot_run() -> None:
    model = Encoder()
    model.token = nn.Parameter(torch.zeros(6))
    with pytest.raises(ModelError, match="'token' is in neither"):
        anatomy(model, **PATHS)
    parts = anatomy(model, **PATHS | {"stem": ["embed", "token"]})
    assert parts.part_of("token") == "stem"
    with pytest.raises(ModelError, match="'token' is a bare tensor"):
        parts.run_stem(model, torch.randn(2, 4))


def test_missing_and_overlapping_parts() -> None:
    with pytest.raises(ModelError, match=r"the stem of Encoder at 'stem', where it has nothing"):
        anatomy(Encoder())
    with pytest.raises(ModelError, match=r"the blocks of Encoder at 'encoder\.layer'"):
        anatomy(Encoder(), **PATHS | {"blocks": "encoder.layer"})
    with pytest.raises(ModelError, match=r"'encoder\.layers\.0' is in two parts"):
        anatomy(Encoder(), **PATHS | {"stem": ["embed", "encoder"]})


def test_check_finds_what_forward_does_between_modules() -> None:
    model = Encoder(squash=True)
    with pytest.raises(ModelError, match="give another result than the model"):
        anatomy(model, **PATHS).check(model, torch.randn(2, 4))
