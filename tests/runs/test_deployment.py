"""Exported models: the right one, the same numbers in every format, within their bytes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import assert_one_sentence, sizewise
from sizewise import config as configs
from sizewise.data import sources
from sizewise.exchange import checkpoint
from sizewise.memory.prediction import Meter
from sizewise.runs import deployment, session

IMAGE = (1, 8, 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network with batch norms, which look at the batch in evaluation; three widths."""
    tables = {
        "rounds": 3,
        "model": {"name": "preresnet8"},
        "data": {"train_limit": 400, "test_limit": 200},
        "fleet": {"devices": 4, "per_round": 4, "budgets": ["500kB", "1MB", "4MB"]},
        "method": {"name": "heterofl", "widths": [0.25, 0.5, 1.0]},
    }
    path = tmp_path_factory.mktemp("deployment") / "run"
    with session.started(configs.from_dict(tables), path) as federation:
        federation.run()
    return path


def export(run: Path, *arguments: str | Path) -> dict[str, Any]:
    answer = sizewise("export", run, *arguments, "--json")
    assert answer.code == 0, answer.err
    facts: dict[str, Any] = json.loads(answer.out)
    return facts


@pytest.mark.parametrize("best", ["width 0.25", "width 0.5", "full"])
def test_the_most_accurate_model_that_fits(best: str, run: Path, tmp_path: Path) -> None:
    """Whichever of the sizes it is, by what the run measured: the newest checkpoint says it."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest = checkpoint.newest(copy / "checkpoints")
    assert newest is not None
    tensors, facts = checkpoint.read_tensors(newest)
    assert list(facts["totals"]["sizes"]) == ["width 0.25", "width 0.5", "full"]
    facts["totals"]["sizes"] = {**dict.fromkeys(facts["totals"]["sizes"], 0.5), best: 0.6}
    checkpoint.write_tensors(newest, tensors, facts)
    chosen = export(copy, "--memory", "20MB", "--out", tmp_path / "m.safetensors")
    assert chosen["size"] == best
    # Where it does not fit, the best of those that do.
    peak = export(copy, "--size", best, "--out", tmp_path / "m.safetensors")["peak_bytes"]
    less = ("--memory", str(peak - 1), "--out", tmp_path / "m.safetensors")
    if best != "width 0.25":
        assert export(copy, *less)["size"] == "width 0.25"


def test_the_smallest_model_that_fits(run: Path, tmp_path: Path) -> None:
    sizes = json.loads((run / "result.json").read_text())["sizes"]
    assert len(sizes) == 3
    peaks = {
        size: export(run, "--size", size, "--out", tmp_path / "m.safetensors")["peak_bytes"]
        for size in sizes
    }
    assert list(peaks.values()) == sorted(peaks.values())
    smallest, *_ = sizes
    exact = ("--memory", str(peaks[smallest]))
    assert export(run, *exact, "--out", tmp_path / "m.safetensors")["size"] == smallest
    answer = sizewise("export", run, "--memory", str(peaks[smallest] - 1))
    assert_one_sentence(answer, f"'{smallest}' needs {peaks[smallest]:,} bytes")


def test_safetensors_come_back_as_the_same_model(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    facts = export(run, "--size", "width 0.5", "--out", out)
    model = deployment.load(out)
    data = sources.load("digits", None, train_limit=400, test_limit=200)
    images = data.transform()(data.test_inputs, None)
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images[:20]])
        assert torch.allclose(alone, model(images[:20]), atol=1e-5), "no result depends on others"
        accuracy = (model(images).argmax(1) == data.test_labels).float().mean()
    assert float(accuracy) == pytest.approx(facts["accuracy"])
    assert sum(t.numel() for t in model.parameters()) == facts["parameters"]
    assert any("running_mean" in name for name in load_file(out))


def test_inference_takes_the_bytes_that_were_predicted(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    facts = export(run, "--size", "full", "--batch", "3", "--out", out)
    model, images = deployment.load(out), torch.randn(3, *IMAGE)
    labels = torch.zeros(3, dtype=torch.int64)
    with Meter(budget=facts["peak_bytes"]) as meter, torch.no_grad():
        meter.track(model, images, labels)
        model(images)
    assert meter.peak == facts["peak_bytes"]


def test_a_torch_program(run: Path, tmp_path: Path) -> None:
    facts = export(run, "--size", "full", "--format", "torch", "--out", tmp_path / "m.pt2")
    assert facts["difference"] <= 1e-5
    assert (tmp_path / "m.pt2").stat().st_size == facts["file_bytes"] > 0


def test_a_model_card_says_what_it_is(run: Path, tmp_path: Path) -> None:
    facts = export(run, "--memory", "20MB", "--out", tmp_path / "m.safetensors")
    card = (tmp_path / "m.md").read_text()
    for words in (f"{facts['accuracy']:.2%}", "digits", "heterofl", "mean", "Limits", "20 MB"):
        assert words in card
    assert json.loads((tmp_path / "m.json").read_text())["class_names"][3] == "3"


# Runs an ONNX model in a fresh process and prints by how much that made the process grow.
MEASURE = """
import sys
import numpy as np
import onnxruntime

def resident():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return 1024 * int(lines["VmRSS"].split()[0]), 1024 * int(lines["VmHWM"].split()[0])

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
before, _ = resident()
model = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
(given,) = model.get_inputs()
images = np.load(sys.argv[2])
(logits,) = model.run(None, {given.name: images})
np.save(sys.argv[3], logits)
print(max(resident()) - before)
"""


def test_an_onnx_model_gives_torchs_logits_and_fits_its_budget(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: the extra [onnx]")
    import numpy as np

    facts = export(run, "--memory", "20MB", "--format", "onnx", "--out", tmp_path / "m.onnx")
    assert facts["peak_bytes"] <= 20_000_000
    assert facts["difference"] <= 1e-4
    export(run, "--size", facts["size"], "--out", tmp_path / "torch.safetensors")
    images = torch.randn(1, *IMAGE, generator=torch.Generator().manual_seed(5))
    np.save(tmp_path / "images.npy", images.numpy())
    command = [sys.executable, "-c", MEASURE]
    command += [str(tmp_path / name) for name in ("m.onnx", "images.npy", "logits.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with torch.no_grad():
        expected = deployment.load(tmp_path / "torch.safetensors")(images).numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - expected).max() <= 1e-4
    assert 0 < int(done.stdout) <= 20_000_000, "what the process grew by when it ran the model"
    # The file is for any number of samples, as its card says.
    assert "| input | float32, (batch, " in (tmp_path / "m.md").read_text()
    np.save(tmp_path / "images.npy", images.expand(3, *IMAGE).numpy())
    subprocess.run(command, capture_output=True, text=True, check=True)
    assert np.abs(np.load(tmp_path / "logits.npy") - expected).max() <= 1e-4


def test_what_torch_exports_for_one_batch_size_only_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: the extra [onnx]")
    whole = torch.onnx.export

    def stumbles(*given: object, dynamic_shapes: object, **others: object) -> object:
        if dynamic_shapes is not None:
            raise torch.onnx.OnnxExporterError("a number that it does not know")
        return whole(*given, dynamic_shapes=None, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.onnx, "export", stumbles)
    facts = export(run, "--memory", "20MB", "--batch", "2", "--out", tmp_path / "m.onnx")
    assert not facts["any_batch"]
    assert "| input | float32, (2, " in (tmp_path / "m.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --memory, the bytes of inference, or --size"),
        (("--memory", "1MB", "--size", "full"), "either --memory"),
        (("--size", "ful"), "the run has no size 'ful'; did you mean 'full'?"),
        (("--memory", "much"), "--memory must be a positive amount"),
        (("--size", "full", "--out", "model.bin"), "--out must end in .safetensors, .onnx, .pt2"),
        (("--size", "full", "--format", "onnx", "--out", "m.pt2"), "files that end in .onnx"),
    ],
)
def test_bad_requests_are_one_sentence(
    run: Path, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert_one_sentence(sizewise("export", run, *arguments), message)


def test_what_is_no_run_or_no_export(tmp_path: Path) -> None:
    assert_one_sentence(sizewise("export", tmp_path, "--size", "full"), "is not a run folder")
    with pytest.raises(deployment.CheckpointError, match="is not a model that `sizewise export`"):
        deployment.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "method",
    [
        {"name": "local"},
        {"name": "local", "sizes": "depth"},
        {"name": "fedin"},
        {"name": "fedgkt", "client": "cnn", "client_args": {"layers": [6, 8]}, "server_epochs": 1},
        {"name": "slt"},
    ],
    ids=lambda method: method.get("sizes", method["name"]),
)
def test_models_of_a_device_or_a_step_come_back_too(tmp_path: Path, method: dict[str, Any]) -> None:
    """Which sizes they have depends on what happened in the run, not on its config alone."""
    tables = {
        "rounds": 2,
        "model": {"name": "cnn", "args": {"layers": [6, 8]}},
        "data": {"train_limit": 120, "test_limit": 40},
        "fleet": {"devices": 3, "per_round": 2, "ratios": [0.95, 2.0]},
        "recipe": {"batch": 8, "lr": 0.05, "norm": "tracked"},
        "method": method,
    }
    with session.started(configs.from_dict(tables), tmp_path / "run") as federation:
        sizes = federation.run()["sizes"]
    images = torch.randn(3, *IMAGE)
    for number, size in enumerate(sizes):
        out = tmp_path / f"{number}.safetensors"
        assert deployment.export(tmp_path / "run", out, size=size)["size"] == size
        found = federation.folder.newest()
        assert found is not None
        expected = federation.method.deploy(found[0])[size].fill().eval()
        with torch.no_grad():
            assert torch.equal(deployment.load(out)(images), expected(images)), size
