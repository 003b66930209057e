"""What a node may take: limits of containers, read and kept."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.errors import ConfigError

pytest.importorskip("flwr")

from deployment import Deployment, memory_group

from sizewise.flower import folder as flower_folder
from sizewise.flower import usage
from sizewise.flower.commands import check_room

TWO = ("sys/fs/cgroup", "0::{}", "memory.max", "memory.current", "inactive_file")
ONE = (
    *("sys/fs/cgroup/memory", "4:memory:{}\n3:cpu,cpuacct:/x", "memory.limit_in_bytes"),
    *("memory.usage_in_bytes", "total_inactive_file"),
)


def machine(root: Path) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:  4096 kB\n")


@pytest.mark.parametrize("version", [ONE, TWO])
@pytest.mark.parametrize("path", ["/", "/a/b", "/not/seen/from/here"])
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("5000", "2000", 3100), ("5000", "6000", -900), ("9223372036854771712", "7", 4096 * 1024)],
)
def test_what_is_left_in_a_container(
    version: tuple[str, ...], path: str, limit: str, used: str, expected: int, tmp_path: Path
) -> None:
    home, row, most, current, cache = version
    machine(tmp_path)
    assert usage.available(tmp_path) == 4096 * 1024
    assert usage.limit(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text(row.format(path) + "\n")
    # The limit of a group holds for those inside it, which may have none.
    group = tmp_path / home
    inner = group / "a/b"
    inner.mkdir(parents=True)
    for folder, bound in ((group, limit), (inner, "max" if most == "memory.max" else "9" * 19)):
        (folder / most).write_text(f"{bound}\n")
        (folder / current).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"other 9\n{cache} 100\n")
    assert usage.available(tmp_path) == expected
    assert usage.limit(tmp_path) == (5000 if limit == "5000" else None)


def test_a_container_that_is_too_small_is_refused_with_the_number() -> None:
    check_room("20MB", None)
    check_room("20MB", 283_000_000)
    check_room(None, 263_000_001)
    with pytest.raises(ConfigError, match=r"needs 283,000,000 bytes: .* has 282,999,999; give it"):
        check_room("20MB", 282_999_999)


def test_what_this_process_takes() -> None:
    if (mine := usage.process_bytes()) is not None:
        assert 10_000_000 < mine < 10**11
    assert usage.process_bytes(2**30) is None


CONFIG: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "preresnet8"},
    "data": {"train_limit": 100, "test_limit": 50},
    "fleet": {"devices": 1, "per_round": 1},
    "recipe": {"batch": 16},
}


@pytest.fixture
def groups() -> Iterator[Any]:
    """A maker of memory cgroups."""
    with ExitStack() as made:

        def make(limit: int) -> Path:
            try:
                return made.enter_context(memory_group(limit))
            except (OSError, KeyError) as error:
                pytest.skip(f"cgroups cannot be made here: {error}")

        yield make


def test_a_node_lives_within_its_container(groups: Any, tmp_path: Path) -> None:
    group = groups(usage.BASE + usage.RESERVE + 20_000_000)
    flower_folder.write(tmp_path / "app", configs.from_dict(CONFIG))
    deployment = Deployment(tmp_path / "flower")
    try:
        deployment.superlink()
        deployment.supernode(0, "memory='20MB'", group=group)
        deployment.run(tmp_path / "app").wait(300)
        result = json.loads((tmp_path / "app-run/result.json").read_text())
    finally:
        deployment.close()
    assert result["refused"] == [], deployment.logs()
    assert result["budget_bytes"] == {"20MB": 20_000_000}


def test_half_of_that_is_refused_and_not_killed(groups: Any) -> None:
    group = groups((usage.BASE + usage.RESERVE + 20_000_000) // 2)
    node = [sys.executable, "-m", "sizewise", "flower", "node", "--insecure"]
    node += ["--node-config", "partition-id=0 memory='20MB'"]
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    done = subprocess.run([*enter, *node], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: a node with memory='20MB' needs 283,000,000 bytes")
    assert "its container has 141," in done.stderr
