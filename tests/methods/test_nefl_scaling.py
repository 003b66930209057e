import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import trace
from sizewise.errors import ConfigError
from sizewise.methods.nefl.scaling import Scaled, published, scaled
from sizewise.models import build

STAGES = [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_width_takes_the_root_of_the_share() -> None:
    assert scaled(0.25, "width", STAGES) == Scaled(0.5)
    assert scaled(1.0, "both", STAGES) == scaled(1.0, "depth", STAGES) == Scaled()


def test_depth_keeps_the_first_blocks_of_every_stage() -> None:
    stages = [range(9), range(9, 18), range(18, 27)]
    kept = scaled(4 / 9, "depth", stages)
    assert kept == Scaled(1.0, tuple(n for n in range(27) if n % 9 < 4))
    assert scaled(0.01, "depth", stages).blocks == (0, 9, 18)


def test_both_shares_the_loss_between_channels_and_blocks() -> None:
    stages = [range(9), range(9, 18), range(18, 27)]
    found = scaled(4 / 9, "both", stages)
    assert found.blocks is not None
    assert len(found.blocks) == 18
    assert found.width == pytest.approx(math.sqrt(2 / 3))


def test_where_blocks_cannot_go_channels_do() -> None:
    assert scaled(0.16, "both", [range(1), range(1, 2)]) == Scaled(0.4)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["width", "depth", "both"]),
    st.integers(1, 31),
)
def test_larger_shares_keep_more(lengths: list[int], scaling: str, part: int) -> None:
    """Channels times blocks, what activations grow with: the search for bytes relies on it."""
    stages, start = [], 0
    for length in lengths:
        stages.append(range(start, start + length))
        start += length

    def size(submodel: Scaled) -> float:
        return submodel.width * (start if submodel.blocks is None else len(submodel.blocks))

    less, more = (scaled(p / 32, scaling, stages) for p in (part, part + 1))  # type: ignore[arg-type]
    assert 0 < less.width <= 1
    assert size(less) <= size(more) * (1 + 1e-9)
    if less.blocks is not None and more.blocks is not None:
        assert set(less.blocks) <= set(more.blocks)


def test_published_submodels_end_with_the_whole_network() -> None:
    for model in ("resnet18", "resnet34", "resnet56", "resnet110"):
        for scaling in ("width", "depth", "both"):
            found = published(model, scaling)  # type: ignore[arg-type]
            assert len(found) == 5
            assert found[-1] == Scaled()
    assert published("resnet18", "depth")[0].blocks == (0, 1, 4, 5)
    six, nine, _ = published("vit_base", "depth")
    assert (six.blocks, nine.blocks) == (tuple(range(6)), tuple(range(9)))
    assert published("wide_resnet101_2", "depth")[0].blocks == (*range(16), 30, 31)


@pytest.mark.parametrize(("number", "dim"), [(0, 672), (1, 732), (2, 768)])
def test_published_transformers_have_embeddings_that_their_heads_divide(
    number: int, dim: int
) -> None:
    """The rule of the public code: ceil(768 p / 12) times 12, and a perceptron of four times it."""
    width = published("vit_base", "both")[number].width
    model = build("vit", classes=3, image=(3, 32, 32), args={"dim": 768, "heads": 12, "depth": 1})
    channels = trace(model, torch.empty(2, 3, 32, 32, device="meta"))
    narrow = shrinking.shrink(model, channels, selection.keep(channels, width), check=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in narrow.state_dict().items()}
    assert shapes["stem.position"][-1] == dim
    assert shapes["blocks.0.attention.query.weight"] == (dim, dim)
    assert shapes["head.linear.weight"] == (3, dim)
    assert (4 * dim, dim) in shapes.values()


def test_the_paper_has_no_others() -> None:
    with pytest.raises(ConfigError, match=r"no submodels of 'cnn' .* turn method.published off"):
        published("cnn", "width")
    for model, scaling in (("wide_resnet101_2", "both"), ("vit_base", "width")):
        with pytest.raises(ConfigError, match="no submodels of") as caught:
            published(model, scaling)  # type: ignore[arg-type]
        assert model not in str(caught.value).partition("only of")[2]
