import copy
from itertools import chain, combinations

import pytest
import torch
from torch import Tensor, nn

from in_place_cases import BLOCKS, Altering, Ladder, SharedLayers, Stages, Tokens
from sizewise.errors import ModelError
from sizewise.surgery.dropping import drop_blocks
from sizewise.surgery.in_place import InPlace, enter
from sizewise.surgery.step_sizes import add_step_sizes
from sizewise.surgery.taking_apart import taken_apart
from sizewise.torch_tools.checkpointing import checkpointed
from sizewise.torch_tools.keeping import AsItIs
from sizewise.torch_tools.remaking import clone, remade

IMAGE = (1, 8, 8)
SUBSETS = list(chain.from_iterable(combinations(range(BLOCKS), n) for n in range(BLOCKS + 1)))


def tokens() -> tuple[Tokens, InPlace]:
    torch.manual_seed(0)
    model = Tokens(classes=3, image=IMAGE)
    parts = taken_apart(model, inputs())
    assert isinstance(parts, InPlace)
    return model, parts


def inputs(count: int = 2) -> Tensor:
    return torch.randn(count, *IMAGE, generator=torch.Generator().manual_seed(1))


# ---- what runs


@pytest.mark.parametrize("runs", SUBSETS)
def test_blocks_are_passed_as_if_they_were_left_out_of_the_code(runs: tuple[int, ...]) -> None:
    model, parts = tokens()
    x, steering = inputs(5), parts.steer(model)
    # The bias of the first layer is carried around those that are passed.
    assert torch.equal(steering.run(model, x, runs), model.logits(x, runs))


@pytest.mark.parametrize("runs", SUBSETS)
def test_dropped_blocks_are_not_held_and_tensors_keep_their_names(runs: tuple[int, ...]) -> None:
    model, parts = tokens()
    x, expected = inputs(5), model.logits(inputs(5), runs)
    names = [n for n in model.state_dict() if parts.part_of(n) not in set(range(BLOCKS)) - {*runs}]
    dropped = drop_blocks(copy.deepcopy(model), parts, parts.shapes, runs)
    assert torch.equal(dropped(x), expected)
    assert list(dropped.state_dict()) == names


def test_hidden_tensors_are_handed_out_and_the_model_ends_there() -> None:
    model, parts = tokens()
    x, steering = inputs(5), parts.steer(model)
    expected = model.hidden(x, range(BLOCKS))
    found, logits = steering.hidden(model, x, range(BLOCKS + 1))
    assert all(torch.equal(found[stop], expected[stop]) for stop in range(BLOCKS + 1))
    assert logits is not None
    assert torch.equal(logits, model.logits(x, range(BLOCKS)))
    vars(model)["end"] = None  # Whoever goes on fails.
    early, nothing = steering.hidden(model, x, {0, 2}, end=2)
    assert nothing is None
    assert early.keys() == {0, 2}
    assert torch.equal(early[2], expected[2])
    assert steering.found is None


def test_a_hidden_tensor_enters_with_the_mask_of_its_inputs() -> None:
    model, parts = tokens()
    x = inputs(5)
    hidden = model.hidden(x, (0, 2))[-1].detach().requires_grad_()
    expected = model.logits(x, (0, 2))
    entrance = parts.enterable(model)
    logits = enter(model, entrance, hidden, x)
    assert torch.equal(logits, expected)
    assert torch.equal(logits, enter(model, entrance, hidden, x))
    logits.sum().backward()
    assert hidden.grad is not None
    assert model.classifier.weight.grad is not None
    assert model.embed.weight.grad is None, "what runs before the entrance is for masks only"
    assert torch.is_grad_enabled()


def test_an_error_in_a_block_leaves_nothing_behind() -> None:
    model, parts = tokens()
    steering = parts.steer(model)
    with pytest.raises(RuntimeError):
        steering.hidden(model, torch.randn(2, 1, 3, 3), {1}, end=1)
    found, logits = steering.hidden(model, inputs(), {1})
    assert set(found) == {1}
    assert logits is not None


def test_other_shapes_are_made_to_fit() -> None:
    torch.manual_seed(0)
    model = Stages(classes=3, image=IMAGE)
    parts = taken_apart(model, inputs())
    assert isinstance(parts, InPlace)
    assert parts.shapes == ((4, 4, 4), (4, 4, 4), (4, 4, 4), (8, 2, 2), (8, 2, 2))
    steering = parts.steer(model.eval())
    assert steering.run(model, inputs(5), {0}).shape == (5, 3)
    with pytest.raises(ModelError, match="this method runs a model's stem, blocks and head one af"):
        parts.run_stem(model, inputs())


# ---- copies, and blocks that run twice


def test_a_copy_obeys_its_own_steering() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.parts = tokens()
            self.steering = self.parts.steer(self.model)

    one, reference = Holder(), tokens()[0]
    other = remade(one, clone)
    x = inputs(5)
    one.steering.runs = {0}
    assert torch.equal(other.model(x), reference(x))
    with torch.no_grad():
        other.model.encoder.layer[0].mixing.weight.zero_()
    assert torch.equal(one.model(x), reference.logits(x, {0}))
    assert not torch.equal(other.model(x), reference(x))


@pytest.mark.parametrize("paths", [["encoder.layer"], ["encoder"]])
def test_blocks_that_run_again_in_the_backward_pass_do_the_same(paths: list[str]) -> None:
    x = inputs(5)
    gradients = []
    for twice in (False, True):
        model, parts = tokens()
        steering = parts.steer(model)
        for parameter in model.encoder.layer[0].parameters():
            parameter.requires_grad_(False)
        if twice:
            with checkpointed(model, paths, AsItIs()):
                steering.run(model, x, {0, 1}).square().sum().backward()
        else:
            steering.run(model, x, {0, 1}).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, checked = gradients
    assert plain.keys() == checked.keys()
    assert not any(name.startswith("encoder.layer.2") for name in plain)
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


# ---- step sizes


def test_step_sizes_multiply_what_a_block_changes() -> None:
    model, parts = tokens()
    x = inputs(5)
    before, after, *_ = model.hidden(x, (0,))
    drop_blocks(model, parts, parts.shapes, (0,))
    add_step_sizes(model, parts, (0,), absorb=True, learns=True)
    (step,) = [p for n, p in model.named_parameters() if "step_size" in n]
    assert step.item() == BLOCKS
    expected = model.end(BLOCKS * (after - before) + before, model.start(x)[1])
    torch.testing.assert_close(model(x), expected)


# ---- whose tensors are


def test_tensors_belong_to_where_they_are_used() -> None:
    _, parts = tokens()
    owners = {name: parts.part_of(name) for name in ("token", "positions", "embed.weight")}
    assert set(owners.values()) == {"stem"}
    assert {parts.part_of(name) for name in ("scale", "norm.weight", "classifier.bias")} == {"head"}
    assert parts.part_of("encoder.layer.1.mixing.weight") == 1
    stages = taken_apart(Stages(classes=3, image=IMAGE), inputs())
    # Both scales are one tensor, which is used first behind the first stage.
    assert stages.part_of("scales") == 1
    assert stages.part_of("stages.1.down.weight") == 1
    assert stages.part_of("stages.0.down.weight") == "stem"
    assert stages.part_of("norm.running_mean") == "stem"
    assert stages.owned(1)[0] == "stages.0.blocks.1"
    assert "scales" in stages.owned(1)


# ---- what cannot be taken apart


def test_a_head_that_sees_more_than_the_last_block_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"what Ladder makes of its blocks, blocks\.0 to blocks\.2"
    ):
        taken_apart(Ladder(classes=3, image=IMAGE), inputs())


def test_what_is_changed_in_place_later_is_handed_out_as_it_was() -> None:
    torch.manual_seed(0)
    model = Altering(classes=3, image=IMAGE).eval()
    parts = taken_apart(model, inputs())
    assert isinstance(parts, InPlace)
    x, expected = inputs(5), model.hidden(inputs(5))
    found, _ = parts.steer(model).hidden(model, x, {1, 2, 3})
    assert all(torch.equal(found[n + 1], hidden) for n, hidden in enumerate(expected))
    # Around the last block, what the one before gave is not changed a second time.
    dropped = drop_blocks(copy.deepcopy(model), parts, parts.shapes, (0,))
    torch.testing.assert_close(dropped(x), model.classifier((expected[0] + 3).mean((2, 3))))


def test_a_layer_that_is_called_again_is_one_block() -> None:
    model = SharedLayers(classes=3, image=IMAGE).eval()
    parts = taken_apart(model, inputs())
    assert parts.blocks == ("layer",)
    assert isinstance(parts, InPlace)
    x, steering = inputs(5), parts.steer(model)
    found, logits = steering.hidden(model, x, {0, 1})
    assert torch.equal(found[0], model.conv(x))
    assert logits is not None
    assert torch.equal(logits, model.classifier(found[1].mean((2, 3))))
