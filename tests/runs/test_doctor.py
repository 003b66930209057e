"""`sizewise doctor` as a user runs it, on a machine with two accelerators."""

import json
import os
import subprocess
import sys

import pytest

import second_device
from sizewise.runs import doctor


def test_every_device_is_tried() -> None:
    environment = {**os.environ, **second_device.environment()}
    command = [sys.executable, "-m", "sizewise", "doctor"]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=environment, check=True
    )
    found = {finding["device"]: finding for finding in json.loads(done.stdout)}
    assert list(found) == ["cpu", "secondary:0", "secondary:1"]
    for finding in found.values():
        # A step that nobody watches may give back a gradient a little earlier.
        assert 0.95 * finding["predicted"] < finding["allocated"] <= finding["predicted"]
        assert finding["repeats"]
        assert finding["as_cpu"]
        assert "trouble" not in finding
    assert found["secondary:1"]["free"] <= found["secondary:1"]["total"]


def test_what_is_said() -> None:
    fine = doctor.Finding("cuda:0", "a card", 10**9, 2 * 10**9, 500, 512, True, False)
    assert str(fine) == (
        "cuda:0 (a card): 1 GB of 2 GB free; a step predicted to take 500 bytes took 512, more "
        "than predicted; a tiny run repeats its bits, which are not those of the CPU; all kernels "
        "of the step are deterministic"
    )
    broken = doctor.Finding("mps:0", "a chip", trouble="RuntimeError: no driver")
    assert str(broken) == "mps:0 (a chip): cannot be used: RuntimeError: no driver"


def test_a_device_that_fails_does_not_end_the_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object) -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "_tiny_run", fail)
    findings = list(doctor.examine())
    assert findings[0].trouble == "RuntimeError: no driver"
    assert len(findings) == len(doctor.devices())
