"""Exits: where they are, what they are made of, and that nothing behind the last one is held."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from depth_cases import NARROW, RENAMED, VIT, make_task
from sizewise.errors import ModelError
from sizewise.families.exits import (
    Gate,
    MultiExit,
    _exit,
    another_head,
    map_exit,
    path_to_end,
    separable,
    stage_ends,
    with_exits,
)
from sizewise.surgery.anatomy import hidden_shapes
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

RESNET18 = [(64, 32, 32)] * 3 + [(128, 16, 16)] * 2 + [(256, 8, 8)] * 2 + [(512, 4, 4)] * 2
DENSE = [(24 + 12 * number, 8, 8) for number in range(13)]


def shapes(*found: tuple[int, ...]) -> list[torch.Size]:
    return [torch.Size(shape) for shape in found]


def shapes_of(task: Task) -> tuple[torch.Size, ...]:
    model = task.build()
    found = hidden_shapes(model.eval(), task.anatomy(model), task.drawn(2))
    assert found == task.hidden_shapes
    return found


def build(task: Task, *stops: int) -> Any:
    return with_exits(task, stops)


# ---- where


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        (RESNET18, [2, 4, 6, 8]),
        ([(17, 192)] * 13, [3, 6, 9, 12]),
        ([(17, 8)] * 4, [1, 2, 3]),
        ([(8,)] * 8, [1, 3, 5, 7]),
        ([(8,), (6,), (6,), (4,)], [2, 3]),
        ([(8,), (6,)], [1]),
        ([(8,)], [0]),
        (DENSE, [3, 6, 9, 12]),
    ],
    ids=["resnet18", "vit", "three", "mlp", "funnel", "one", "none", "dense"],
)
def test_stages_end_where_the_shape_changes(found: list[tuple[int, ...]], ends: list[int]) -> None:
    assert stage_ends(shapes(*found)) == ends


def test_the_zoo_has_the_stages_of_the_papers() -> None:
    assert stage_ends(shapes_of(make_task("preresnet20", image=(3, 32, 32)))) == [3, 6, 9]
    assert stage_ends(shapes_of(make_task("resnet18", {"maxpool": False}))) == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("found", "stop", "channels"),
    [
        (RESNET18, 2, [64, 128, 256, 512]),
        (RESNET18, 4, [128, 256, 512]),
        (RESNET18, 6, [256, 512]),
        (RESNET18, 3, [128, 256, 512]),
        (RESNET18, 7, [512]),
        (RESNET18, 0, [64, 128, 256, 512]),
        ([(8, 4, 4), (8, 4, 4), (8, 4, 4), (8, 4, 4)], 1, [8]),
        ([(4, 8, 8), (4, 8, 8), (8, 4, 4), (20,)], 1, [4, 8]),
        (DENSE, 3, [60, 96, 132, 168]),
    ],
)
def test_an_exit_follows_the_stages_to_come(
    found: list[tuple[int, ...]], stop: int, channels: list[int]
) -> None:
    assert path_to_end(shapes(*found), stop) == channels


# ---- what


def test_a_separable_block_by_hand() -> None:
    block = separable(3, 5)
    x = torch.randn(4, 3, 6, 6)
    weights = {name: p.detach() for name, p in block.named_parameters()}
    y = F.conv2d(x, weights["depthwise1.weight"], stride=2, padding=1, groups=3)
    y = F.batch_norm(F.conv2d(y, weights["pointwise1.weight"]), None, None, training=True).relu()
    y = F.conv2d(y, weights["depthwise2.weight"], padding=1, groups=3)
    y = F.batch_norm(F.conv2d(y, weights["pointwise2.weight"]), None, None, training=True).relu()
    assert y.shape == (4, 5, 3, 3)
    torch.testing.assert_close(block(x), y)
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters() if p.ndim > 1}
    assert shapes == {
        "depthwise1.weight": (3, 1, 3, 3),
        "pointwise1.weight": (3, 3, 1, 1),
        "depthwise2.weight": (3, 1, 3, 3),
        "pointwise2.weight": (5, 3, 1, 1),
    }


@pytest.mark.parametrize("size", [(6, 6), (7, 7), (1, 1), (3, 5), (2, 1)])
def test_a_gate_weighs_a_map_of_any_size(size: tuple[int, int]) -> None:
    gate, x = Gate((3, *size)), torch.randn(4, 3, *size)
    half = F.batch_norm(gate.weigh.separable(x), None, None, training=True).relu()  # type: ignore[operator, union-attr]
    up = F.interpolate(half, size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(gate(x), up.sigmoid() * x)


def test_the_exits_of_the_paper_have_its_weights() -> None:
    # Counted by hand: an even map is gated at half its size, then channels double to 512.
    for stop, after in ((2, (64, 128, 256, 512)), (4, (128, 256, 512)), (6, (256, 512))):
        way = map_exit(RESNET18[stop], after, 100)
        pairs = [(after[0], after[0]), *pairwise(after)]
        expected = sum(18 * a + a * a + a * b + 2 * (a + b) for a, b in pairs)
        expected += 2 * after[0] + 512 * 100 + 100
        assert sum(p.numel() for p in way.parameters()) == expected
        assert len(way.stages) == len(after) - 1  # type: ignore[arg-type]
        assert way(torch.randn(2, *RESNET18[stop])).shape == (2, 100)


def test_maps_of_one_pixel_still_have_an_exit() -> None:
    way = map_exit((4, 1, 1), (4, 8, 16), 3)
    assert way(torch.randn(2, 4, 1, 1)).shape == (2, 3)


@pytest.mark.parametrize(("norm", "tracks"), [("batch", False), ("sbn", False), ("tracked", True)])
def test_norms_of_exits_follow_the_recipe(norm: str, tracks: bool) -> None:
    found = [
        m for m in build(make_task(norm=norm), 2, 4).modules() if isinstance(m, nn.BatchNorm2d)
    ]
    assert len(found) > 9
    assert all((layer.running_mean is not None) == tracks for layer in found)


def test_tokens_leave_through_a_head_of_their_own() -> None:
    task = make_task("vit", VIT)
    module = build(task, 1, 2, 3)
    heads = [module.exits["1"], module.exits["2"], module.model.head]
    weights = [next(p for p in head.parameters() if p.ndim == 2) for head in heads]
    assert len({tuple(weight.shape) for weight in weights}) == 1
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert [logits.shape for logits in module.logits(torch.randn(2, 1, 8, 8))] == [(2, 3)] * 3


def test_a_head_is_drawn_once_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    task, drawn, build_one = make_task("vit", VIT), [], Task.build

    def counted(self: Task, width: float = 1.0, draw: int = 0) -> nn.Module:
        drawn.append(draw)
        return build_one(self, width, draw)

    monkeypatch.setattr(Task, "build", counted)
    first, second = (dict(another_head(task, 2).named_parameters()) for _ in range(2))
    assert drawn.count(2) == 1
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Whoever trains the one does not train the other.
    assert all(first[name].data_ptr() != second[name].data_ptr() for name in first)


def test_features_leave_through_a_linear_layer() -> None:
    module = build(make_task("mlp", {"hidden": [8, 6, 4]}), 1, 2)
    assert module.exits["1"].weight.shape == (3, 6)


class Merging(nn.Module):
    """Halves the number of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, ::2]


def merging(*, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), Merging(), nn.Flatten(), nn.Linear(16, 3))


def test_tokens_of_another_shape_leave_through_their_mean() -> None:
    task = make_task("test_exits:merging", image=(4, 8, 8))
    assert [len(shape) for shape in shapes_of(task)] == [2, 2, 2, 1]
    module = build(task, 2, 3).eval()
    x = torch.randn(5, 4, 8, 8)
    norm, linear = module.exits["2"].norm, module.exits["2"].linear
    expected = linear(norm(module.model[1](x.flatten(2))[:, ::2]).mean(1))
    torch.testing.assert_close(module.logits(x)[0], expected)


def test_tags_of_tokens_of_another_shape_are_refused() -> None:
    classes = make_task("test_exits:merging", image=(4, 8, 8))
    task = replace(classes, target="tags")
    vars(task)["hidden_shapes"] = classes.hidden_shapes
    with pytest.raises(ModelError, match=r"after 2 blocks a sample has the shape \(2, 8\)"):
        _exit(task, 2)


# ---- models whose own forward stays in charge


def test_an_exit_in_place_has_the_models_own_way_with_weights_of_its_own() -> None:
    task = make_task("in_place_cases:Tokens")
    module, reference = build(task, 1, 2, 3), task.build()
    x = torch.randn(5, 1, 8, 8)
    first, second, last = module.logits(x)
    assert torch.equal(last, reference(x))
    hidden, mask = reference.hidden(x, range(3)), reference.start(x)[1]
    for stop, logits in ((1, first), (2, second)):
        own = module.exits[str(stop)].model
        assert not torch.equal(own.classifier.weight, reference.classifier.weight)
        assert torch.equal(logits, own.end(hidden[stop], mask))
    # The stem is one for all; exits have nothing but a head.
    names = {n.partition("model.")[2] for n in own_tensors(module) if n.startswith("exits.1")}
    head = ("scale", "norm.weight", "norm.bias", "classifier.weight", "classifier.bias")
    assert names == set(head)


def test_a_shallow_model_in_place_holds_nothing_behind_its_exit() -> None:
    task = make_task("in_place_cases:Tokens")
    module, reference = build(task, 2), task.build()
    x = torch.randn(5, 1, 8, 8)
    (logits,) = module.logits(x)
    own = module.exits["2"].model
    assert torch.equal(logits, own.end(reference.hidden(x, range(3))[2], reference.start(x)[1]))
    held = {name.removeprefix("model.") for name in own_tensors(module) if "exits" not in name}
    parts = ("stem", 0, 1)
    assert held == {n for n in reference.state_dict() if task.parts.part_of(n) in parts}
    logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_norms_of_a_shared_stem_see_a_batch_once() -> None:
    task = make_task("in_place_cases:Stages", norm="tracked")
    module = build(task, 3, 4).train()
    module.exits["3"] = another_head(task, 7)
    module.exits["3"].share_stem(module.model)
    module.train()
    module.logits(torch.randn(5, 1, 8, 8))
    assert module.model.norm.num_batches_tracked == 1
    assert module.exits["3"].model.norm.running_mean is module.model.norm.running_mean


# ---- a model with exits


def test_the_last_exit_is_the_model_itself() -> None:
    task = make_task(norm="tracked")
    module, model = build(task, 2, 3, 4).eval(), task.build().eval()
    x = torch.randn(5, 1, 8, 8)
    first, second, last = module.logits(x)
    assert torch.equal(last, model(x))
    assert not torch.equal(first, second)
    torch.testing.assert_close(module(x), (first + second + last) / 3)
    assert torch.equal(build(task, 4).eval()(x), model(x))


@pytest.mark.parametrize(
    ("model", "anatomy"),
    [(NARROW, {}), ("depth_cases:sequential", {}), ("depth_cases:Renamed", RENAMED)],
)
def test_what_comes_after_the_last_exit_is_not_held(model: str, anatomy: dict[str, str]) -> None:
    task = make_task(model, anatomy=anatomy)
    parts = task.anatomy(task.build())
    whole = own_tensors(task.build())
    for stop in (0, 2, 4):
        module = build(task, stop)
        kept = {n.removeprefix("model.") for n in own_tensors(module) if n.startswith("model.")}
        held = {"stem", *range(stop)} | ({"head"} if stop == 4 else set())
        assert kept == {name for name in whole if parts.part_of(name) in held}
        assert module(torch.randn(2, 1, 8, 8)).shape == (2, 3)
        assert list(module.exits) == ([] if stop == 4 else [str(stop)])


def test_exits_are_the_same_in_every_submodel_and_differ_from_each_other() -> None:
    task = make_task()
    alone, all_three = own_tensors(build(task, 2)), own_tensors(build(task, 2, 3, 4))
    shared = [name for name in alone if name.startswith("exits.2")]
    assert shared
    assert all(torch.equal(alone[name], all_three[name]) for name in shared)


def test_a_model_without_blocks_has_one_exit() -> None:
    task = make_task("linear")
    module, x = build(task, 0), torch.randn(2, 1, 8, 8)
    assert isinstance(module, MultiExit)
    assert torch.equal(module(x), task.build()(x))
