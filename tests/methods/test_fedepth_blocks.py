"""Taking a model apart, running it up to a block, and the ways out of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from depth_cases import narrow
from sizewise.common.structure import plain
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, TrainingStage, read_plan
from sizewise.methods.fedepth.blocks import Blocks, Blockwise, Frozen, Run, TakenApart
from sizewise.surgery.anatomy import anatomy, hidden_shapes
from sizewise.surgery.links import skip_link

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    return narrow(classes=3, image=(1, 8, 8)).eval()


def taken_apart(model: nn.Module, exits: dict[int, nn.Module], links: bool = True) -> Blockwise:
    parts = anatomy(model)
    shapes = hidden_shapes(model, parts, torch.zeros(2, 1, 8, 8))
    return Blockwise(model, parts, shapes, exits, links).eval()


@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        (Blocks((0,)), "1"),
        (Blocks((2, 3), (0, 1), False), "3-4"),
        (Blocks((2,), (0, 1), False, micro=4), "3 (4 at a time before)"),
        (Blocks((3,)), "4 without 1, 2, 3"),
        (Blocks((3,), (0, 2), False), "4 without 2"),
    ],
)
def test_a_stage_has_a_name_of_its_own(blocks: Blocks, name: str) -> None:
    assert blocks.label == name
    assert Run(blocks).label == name
    assert Run(blocks, (blocks,)).label == f"{name} + {name}"
    assert blocks.stop == blocks.learn[-1] + 1
    for run in (Run(blocks), Run(blocks, (blocks, blocks))):
        plan = Plan(0, 0, "any", TakenApart(True), (TrainingStage(0.1, 1, work=run),))
        assert read_plan(plain(plan), TakenApart, Run) == plan


def test_a_stage_is_read_strictly() -> None:
    values = plain(Plan(0, 0, "any", TakenApart(True), (TrainingStage(0.1, 1),)))
    values["stages"][0]["work"] = {"blocks": {"learn": [0], "frosen": []}}
    with pytest.raises(ConfigError, match=r"stages.*frosen"):
        read_plan(values, TakenApart, Run)


def test_shapes_between_the_blocks(model: nn.Module) -> None:
    shapes = hidden_shapes(model, anatomy(model), torch.zeros(2, 1, 8, 8))
    assert [tuple(shape) for shape in shapes] == [(4, 8, 8)] * 3 + [(8, 4, 4), (12, 2, 2)]


# ---- the link


def test_link_strides_and_puts_zeros_on_both_sides() -> None:
    x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4) + 1
    y = skip_link(x, (6, 2, 2))
    assert y.shape == (2, 6, 2, 2)
    assert torch.equal(y[:, 1:4], x[:, :, ::2, ::2])
    assert not y[:, :1].any()
    assert not y[:, 4:].any()  # Of three missing channels, two are behind.


def test_link_keeps_the_first_channels_of_too_many() -> None:
    x = torch.randn(2, 5, 4, 4)
    assert torch.equal(skip_link(x, (3, 4, 4)), x[:, :3])


@pytest.mark.parametrize("shape", [(4, 3, 3), (5, 8), (7,)])
def test_link_is_nothing_where_the_shape_fits(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, *shape)
    assert skip_link(x, shape) is x


@given(st.integers(1, 70), st.integers(0, 3), st.booleans())
def test_link_gives_the_expected_map_for_images_of_any_side(
    side: int, times: int, up: bool
) -> None:
    # Layers with a stride of 2 round up, pools round down.
    last = side
    for _ in range(times):
        last = (last + 1) // 2 if up else max(last // 2, 1)
    y = skip_link(torch.ones(1, 1, side, side), (2, last, last))
    assert y.shape == (1, 2, last, last)
    if up:
        assert y[:, 0].all()  # Nothing had to be filled up.


# ---- running it


def test_all_blocks_at_once_are_the_model(model: nn.Module) -> None:
    whole = taken_apart(model, {})
    assert torch.equal(whole(IMAGES, Blocks((0, 1, 2, 3))), model(IMAGES))


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_frozen_or_not_a_run_computes_the_same(model: nn.Module, stop: int) -> None:
    whole = taken_apart(model, {})
    expected = whole(IMAGES, Blocks(tuple(range(stop))))
    frozen = tuple(range(stop - 1))
    assert torch.equal(whole(IMAGES, Blocks((stop - 1,), frozen, stem=False)), expected)


def test_blocks_that_are_not_named_are_not_run(model: nn.Module) -> None:
    whole = taken_apart(model, {})
    hidden = model.stem(IMAGES)  # type: ignore[operator]
    for number in (2, 3):
        hidden = model.blocks[number](hidden)  # type: ignore[index]
    expected = model.head(hidden)  # type: ignore[operator]
    assert torch.equal(whole(IMAGES, Blocks((2, 3))), expected)
    assert torch.equal(whole(IMAGES, Blocks((3,), (2,), stem=False)), expected)


def test_only_what_learns_is_in_the_graph(model: nn.Module) -> None:
    whole = taken_apart(model, {})
    whole(IMAGES, Blocks((2,), (0, 1), stem=False)).sum().backward()
    names = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    assert {name.split(".")[0] for name in names} == {"blocks", "head"}
    assert all(name.startswith(("blocks.2.", "head")) for name in names)


@pytest.mark.parametrize("micro", [1, 2, 4, 5, 6, 50])
def test_parts_of_a_batch_give_what_the_batch_gives(model: nn.Module, micro: int) -> None:
    whole = taken_apart(model, {})
    expected = whole(IMAGES, Blocks((3,), (0, 1, 2), stem=False))
    found = whole(IMAGES, Blocks((3,), (0, 1, 2), stem=False, micro=micro))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    bare = whole.before(IMAGES, Blocks((0,), (), stem=False, micro=micro), model)
    torch.testing.assert_close(bare, model.stem(IMAGES), rtol=1e-6, atol=1e-6)  # type: ignore[operator]


def test_a_buffered_stage_starts_behind_its_frozen_blocks(model: nn.Module) -> None:
    whole = taken_apart(model, {})
    hidden = IMAGES
    for number in (-1, 0, 1):
        part = whole.part(hidden, number)
        assert torch.equal(Frozen(whole, number)(hidden), part)
        assert not part.requires_grad
        hidden = part
    found = whole(hidden, Blocks((2, 3), (0, 1), stem=False, buffered=True))
    assert torch.equal(found, model(IMAGES))


# ---- ways out


def test_an_exit_is_a_head_or_leads_to_the_head(model: nn.Module) -> None:
    def before(x: Tensor) -> Tensor:
        return model.blocks[1](model.blocks[0](model.stem(x)))  # type: ignore[index, operator, no-any-return]

    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 8, 3))
    own = taken_apart(model, {2: head}, links=False)
    assert torch.equal(own(IMAGES, Blocks((0, 1))), head(before(IMAGES)))
    link = nn.Conv2d(4, 12, 1, 4, bias=False)
    led = taken_apart(model, {2: link}, links=True)
    assert torch.equal(led(IMAGES, Blocks((0, 1))), model.head(link(before(IMAGES))))  # type: ignore[operator]
    # Other runs, and the last one, are not concerned.
    plain_way = taken_apart(model, {})
    for blocks in (Blocks((0,)), Blocks((0, 1, 2, 3))):
        assert torch.equal(own(IMAGES, blocks), plain_way(IMAGES, blocks))


def test_a_peer_is_run_in_place_of_the_model(model: nn.Module) -> None:
    peer = narrow(classes=3, image=(1, 8, 8)).eval()
    parts = anatomy(model)
    shapes = hidden_shapes(model, parts, torch.zeros(2, 1, 8, 8))
    whole = Blockwise(model, parts, shapes, {}, True, [peer]).eval()
    blocks = Blocks((0, 1, 2, 3))
    assert torch.equal(whole(IMAGES, blocks, whole.peers[0]), peer(IMAGES))
    assert not torch.equal(whole(IMAGES, blocks), peer(IMAGES))


def test_features_of_a_perceptron_are_padded_on_both_sides() -> None:
    features = torch.arange(1.0, 7).reshape(2, 3)
    assert skip_link(features, (6,)).tolist() == [[0, 1, 2, 3, 0, 0], [0, 4, 5, 6, 0, 0]]
    assert skip_link(features, (2,)).tolist() == [[1, 2], [4, 5]]
