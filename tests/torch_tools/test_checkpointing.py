"""Blocks that run twice: found, named, refused where it would go wrong."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lever_cases import MODELS, built
from sizewise.errors import ModelError
from sizewise.memory.meter import Meter
from sizewise.torch_tools.checkpointing import checkpointed, found_blocks
from sizewise.torch_tools.keeping import AsItIs


def chain(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)))


def same_gradients(module: nn.Module, inputs: Tensor, *paths: str) -> bool:
    plain = copy.deepcopy(module)
    for one in (plain, module):
        torch.manual_seed(0)
        if one is module:
            with checkpointed(one, paths, AsItIs()):
                one(inputs).square().sum().backward()
        else:
            one(inputs).square().sum().backward()
    pairs = zip(plain.parameters(), module.parameters(), strict=True)
    return all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in pairs
    )


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("cnn", ["stem", "blocks.0", "blocks.1"]),
        ("group norm", ["blocks.0", "blocks.1"]),
        ("preresnet", [f"blocks.{number}" for number in range(9)]),
        ("vit", ["blocks.0", "blocks.1"]),
        ("mlp", ["stem", "blocks.0", "blocks.1"]),
        ("encoder", ["bert.bert.encoder.layer.0", "bert.bert.encoder.layer.1"]),
        ("depthwise", ["1", "2"]),
    ],
)
def test_blocks_are_found(name: str, paths: list[str]) -> None:
    module = built(name)
    assert found_blocks(module) == {path: module.get_submodule(path) for path in paths}


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_where_there_are_none_one_sentence_says_so(name: str) -> None:
    with pytest.raises(ModelError, match="Recurrent has no list of blocks to checkpoint"):
        found_blocks(built(name))


def test_a_long_row_of_plain_layers_is_divided() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    module = nn.Sequential(*layers)
    assert found_blocks(module) == {"": module}
    peaks = []
    for run in (copy.deepcopy(module), module):
        inputs = torch.randn(500, 64)
        with Meter() as meter:
            meter.track(run, inputs)
            if run is module:
                with checkpointed(module, [], AsItIs()):
                    module(inputs).sum().backward()
            else:
                run(inputs).sum().backward()
        peaks.append(meter.peak)
    assert peaks[1] < 0.75 * peaks[0]
    module.zero_grad()
    assert same_gradients(module, torch.randn(5, 64))


def test_modules_are_left_as_they_were() -> None:
    module = chain()
    module[1].forward = nn.Sequential.forward.__get__(module[1])  # Somebody else's own.
    before, names = [dict(vars(block)) for block in module], list(module.state_dict())
    with checkpointed(module, [], AsItIs()):
        assert list(module.state_dict()) == names
        assert [dict(vars(block)) for block in module] != before
    assert [dict(vars(block)) for block in module] == before
    with pytest.raises(RuntimeError, match="shapes"), checkpointed(module, [], AsItIs()):
        module(torch.ones(2, 7))
    assert [dict(vars(block)) for block in module] == before


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        (["9"], "has no module at '9'"),
        (["1", "1.0"], "checkpointed twice"),
    ],
)
def test_paths_that_name_nothing_or_too_much(paths: list[str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason), checkpointed(chain(), paths, AsItIs()):
        pass


class Odd(nn.Module):
    """A block that takes and gives more than one tensor, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: dict[str, Any], *, scale: float) -> dict[str, Any]:
        mixed, _ = self.attention(x, x, x)
        return {"x": F.dropout(mixed, 0.3) * scale, "y": [self.layer(other["y"]).relu()]}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: dict[str, Any] = {"x": x, "y": [x]}
        for block in self.blocks:
            out = block(out["x"], {"y": out["y"][0]}, scale=2.0)
        total: Tensor = out["x"] + out["y"][0]
        return total


def test_any_inputs_and_outputs() -> None:
    assert same_gradients(Around(), torch.randn(4, 3, 6))
    module = Around()  # The attention alone asks whether its three inputs are one tensor.
    assert same_gradients(module, torch.randn(4, 3, 6), *(f"blocks.{n}.attention" for n in (0, 1)))


class Shared(nn.Module):
    """One block, used twice, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.block(x)) + x
        return out


def test_a_block_that_is_used_twice() -> None:
    assert same_gradients(Shared(), torch.randn(4, 6), "block")


def test_frozen_blocks_and_frozen_inputs() -> None:
    module = chain()
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    assert same_gradients(module, torch.randn(4, 6), "0", "1", "2")
    with torch.no_grad(), checkpointed(module, [], AsItIs()):
        assert not module(torch.randn(4, 6)).requires_grad


def test_automatic_precision_is_that_of_the_first_run() -> None:
    plain = chain()
    twice = copy.deepcopy(plain)
    inputs = torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = plain(inputs).float().sum()
    first.backward()
    with checkpointed(twice, [], AsItIs()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = twice(inputs).float().sum()
        second.backward()
    for expected, found in zip(plain.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


class Bad(nn.Module):
    """A block that does not do the same thing twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.runs, self.layer = how, 0, nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.how == "buffer":
            self.seen += 1
        if self.how == "input":
            x.mul_(2)
        if self.how == "shape" and self.runs > 1:
            x = x[:1]
        if self.how == "less" and self.runs > 1:
            return x
        out: Tensor = self.layer(x).tanh()
        return out


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("buffer", "Bad changes its own tensors as it runs, so it cannot be checkpointed"),
        ("input", r"shape \(3, 6\) .* was changed in place"),
        ("shape", "Bad computed other shapes"),
        ("less", "Bad saved less"),
        ("weights", "Bad changes its own tensors before its backward pass"),
    ],
)
def test_what_cannot_run_twice_is_one_sentence(how: str, reason: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Bad(how), nn.Linear(6, 6))

    def step() -> None:
        value = module(torch.randn(3, 6)).sum()
        if how == "weights":
            with torch.no_grad():
                module[1].layer.weight.add_(1)
        value.backward()

    with pytest.raises(ModelError, match=reason), checkpointed(module, ["1"], AsItIs()):
        step()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lstm", "gru")])
def test_nothing_is_left_behind(name: str) -> None:
    module = built(name)
    inputs = torch.randint(1, 50, (4, 12)) if name == "encoder" else torch.randn(4, 3, 16, 16)
    gc.collect()
    gc.disable()  # What is only held by a circle would be alive until somebody collects it.
    try:
        with checkpointed(module, [], AsItIs()):
            module(inputs).sum().backward()  # The gradients are there now, and the loss's kernels.
            with Meter() as meter:
                meter.track(module, inputs)
                before = meter.live
                module(inputs).sum().backward()
                assert meter.live == before
    finally:
        gc.enable()
