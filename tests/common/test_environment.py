import json
from pathlib import Path

import pytest

from sizewise import config as configs
from sizewise.common.environment import SAME_BITS, drift, environment
from sizewise.runs import session


def test_environment_says_what_the_last_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    found = environment()
    assert found["cpu"]
    assert "ONEDNN_MAX_CPU_ISA=SSE41" in found["cpu_limits"]
    assert found["same_bits"] == SAME_BITS
    assert all(isinstance(value, str) for value in found.values())


def test_the_same_machine_gives_the_same_bits() -> None:
    assert drift(environment()) is None
    assert drift({**environment(), "started": "long ago", "cores": "1000"}) is None
    assert drift({}) is None  # A run folder of an earlier version.


def test_another_cpu_or_torch_is_named() -> None:
    said = drift({**environment(), "cpu": "ABACUS", "torch": "0.4"})
    assert said is not None
    assert "cpu was ABACUS and is " in said
    assert "torch was 0.4 and is " in said


def test_a_run_that_goes_on_elsewhere_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {
        "rounds": 1,
        "data": {"train_limit": 60, "test_limit": 20},
        "method": {"name": "fedavg"},
    }
    config = configs.from_dict({**tables, "model": {"name": "linear"}})
    with session.started(config, tmp_path / "run") as federation:
        federation.run()
    path = tmp_path / "run" / "environment.json"
    for cpu in (environment()["cpu"], "ABACUS"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "cpu": cpu}))
        caplog.clear()
        with session.resumed(tmp_path / "run"):
            pass
        assert ("cpu was ABACUS" in caplog.text) == (cpu == "ABACUS")
