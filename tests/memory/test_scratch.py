"""Scratch space by hand, and against what malloc hands out."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from sizewise.memory import prediction, scratch
from sizewise.memory.prediction import predict

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def _amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that was measured, whatever this one is."""
    monkeypatch.setattr(scratch, "unknown_cpu", lambda: None)
    monkeypatch.setattr(scratch, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    prediction._costs.clear()
    prediction._runs.clear()


@pytest.mark.parametrize(
    ("inputs", "weights", "forward", "backward"),
    [
        # Input and output are blocks of 16 channels; weights are small.
        ((2, 16, 8, 8), (20, 16, 3, 3), 4 * (2 * 32 * 64 + 20 * 16 * 9), 4 * 2 * (16 + 32) * 64),
        # On small maps they are all there is.
        ((2, 64, 2, 2), (64, 64, 3, 3), 4 * (2 * 64 * 4 + 64 * 64 * 9), 4 * 64 * 64 * 9),
        # In three dimensions, maps that are smaller than the kernel take them four times.
        ((2, 64, 2, 2, 2), (64, 64, 3, 3, 3), 4 * (2 * 64 * 8 + 64**2 * 27), 4 * 4 * 64**2 * 27),
        # Few channels are not copied.
        ((2, 4, 8, 8), (16, 4, 3, 3), 4 * (2 * 16 * 64 + 16 * 4 * 9), 4 * 2 * (16 + 16 - 4) * 64),
    ],
)
def test_convolutions_by_hand(
    inputs: tuple[int, ...], weights: tuple[int, ...], forward: int, backward: int
) -> None:
    x, w = torch.empty(inputs, device="meta"), torch.empty(weights, device="meta")
    sides = len(inputs) - 2
    how = ([1] * sides, [1] * sides, [1] * sides, False, [0] * sides, 1)
    out = torch.ops.aten.convolution(x, w, None, *how)
    assert scratch.of("aten::convolution", (x, w, None, *how), out) == forward
    args = (out, x, w, None, *how, [True, True, False])
    assert scratch.of("aten::convolution_backward", args, None) == backward


@pytest.mark.usefixtures("_amd")
def test_products_pack_if_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> int:
        a, b = torch.empty(rows, 8, dtype=dtype), torch.empty(8, columns, dtype=dtype)
        return scratch.of("aten::mm", (a, b), a @ b)

    assert needed(192, 192) == 1_000_000
    assert needed(191, 192) == needed(192, 191) == needed(500, 500, torch.bfloat16) == 0
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pytest.raises(scratch.NotMeasured, match="a product of bfloat16"):
        needed(500, 500, torch.bfloat16)


def test_an_lstm_by_hand() -> None:
    steps, batch, size, units = 5, 3, 4, 6
    weights = [torch.empty(4 * units, size), torch.empty(4 * units, units)]
    inputs, out = torch.empty(steps, batch, size), torch.empty(steps, batch, units)
    gates, both = 4 * 4 * steps * batch * units, 4 * 4 * units * (size + units)
    args = (inputs, *weights, *[None] * 4, out)
    assert scratch.of("aten::mkldnn_rnn_layer", args, (out,)) == gates + both
    needed = scratch.of("aten::mkldnn_rnn_layer_backward", args, None)
    assert needed == gates + 2 * both + 4 * steps * batch * units
    with pytest.raises(scratch.NotMeasured, match="an LSTM of bfloat16"):
        scratch.of("aten::mkldnn_rnn_layer", (inputs.bfloat16(), *weights), (out,))


@pytest.mark.usefixtures("_amd")
@pytest.mark.parametrize(
    ("layer", "shape", "reason"),
    [
        (nn.ConvTranspose2d(2, 3, 2), (1, 2, 4, 4), "a transposed convolution of float32"),
        (nn.Conv2d(2, 3, 2).double(), (1, 2, 4, 4), "a convolution of float64"),
        (nn.Linear(4, 3).double(), (1, 2, 4, 4), "a product of float64"),
        (
            nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
            (1, 2, 4, 4),
            "a convolution with channels last",
        ),
    ],
)
def test_what_was_not_measured_is_not_known(
    layer: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    inputs = torch.empty(shape, dtype=next(layer.parameters()).dtype)
    footprint = predict(nn.Sequential(layer, nn.Flatten()), inputs)
    assert (footprint.process, footprint.not_known_for) == (None, reason)
    assert footprint.peak > 0


def test_a_cpu_that_was_not_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(scratch, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    prediction._costs.clear()
    prediction._runs.clear()
    footprint = predict(nn.Linear(4, 3), torch.empty(2, 4))
    assert footprint.process is None
    assert footprint.not_known_for == "this CPU (AuthenticAMD, AVX2)"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert scratch.unknown_cpu() is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert scratch.unknown_cpu() == "this CPU (AuthenticAMD, SSE41)"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(scratch, "_vendor", lambda: "")
    assert scratch.unknown_cpu() is not None


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Path]:
    """`benchmarks/memory.py`, and the heap counter."""
    if scratch.unknown_cpu() or scratch._vendor() != "AuthenticAMD" or not shutil.which("gcc"):
        pytest.skip("needs gcc and a CPU like the one that was measured")
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARKS / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    counter = tmp_path_factory.mktemp("heap") / "heap.so"
    source = str(BENCHMARKS / "heap.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(counter), source], check=True)
    return module, counter


@pytest.mark.parametrize("case", ["lstm", "conv3d", "resnet18, 8x8", "preresnet20, bfloat16"])
def test_what_malloc_hands_out(case: str, benchmark: tuple[ModuleType, Path]) -> None:
    module, counter = benchmark
    result = module.run(module.Case(case, 32), counter)
    assert result.predicted == result.metered
    assert abs(result.error) < 0.05
