"""The same on a real GPU. Nobody has run these yet; see docs/accelerators.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.runs import doctor, session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")

TINY: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "preresnet8"},
    "data": {"train_limit": 600, "test_limit": 200},
    "fleet": {"devices": 6, "per_round": 6, "ratios": [0.5, 0.75, 1.0]},
    "method": {"name": "heterofl"},
    "recipe": {"batch": 16, "lr": 0.05},
}


def run(path: Path, engine: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    tables = {**TINY, "engine": engine, "recipe": TINY["recipe"] | recipe}
    with session.started(configs.from_dict(tables), path) as federation:
        return federation.run()


def test_a_gpu_learns_what_the_cpu_learns(tmp_path: Path) -> None:
    there = run(tmp_path / "cuda", {"device": "cuda"})
    here = run(tmp_path / "cpu", {"device": "cpu"})
    assert there["accuracy"] == pytest.approx(here["accuracy"], abs=0.05)
    plans = [
        [json.loads(line)["predicted"] for line in (tmp_path / name / "updates.jsonl").open()]
        for name in ("cuda", "cpu")
    ]
    assert plans[0] == plans[1], "plans go by the bytes of the devices that are simulated"


def test_workers_share_a_gpu(tmp_path: Path) -> None:
    run(tmp_path / "run", {"device": "cuda:0", "workers": 4, "device_memory": "500MB"})


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_precisions(precision: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", {"device": "cuda"}, precision=precision)["accuracy"] > 0.3


def test_a_step_takes_no_more_than_predicted() -> None:
    for finding in list(doctor.examine())[1:]:
        assert finding.trouble is None
        assert finding.predicted is not None
        assert finding.allocated is not None
        assert finding.allocated <= finding.predicted
