"""TLS and node authentication, by the very commands of docs/flower.md."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from deployment import Deployment
from test_flower_deployment import MEMORY, app_of, expected, result_of

__all__ = ["expected"]

PAGE = Path(__file__).resolve().parents[2] / "docs/flower.md"
NEEDED = ("bash", "openssl", "ssh-keygen")

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys, made as the page says."""
    folder = tmp_path_factory.mktemp("pki")
    section = PAGE.read_text().partition("## TLS and node authentication")[2]
    recipes = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert len(recipes) == 2
    for recipe in recipes:
        command = ["bash", "-euc", recipe]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def deployment(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("flower"), keys)
    try:
        made.superlink()
        for number in range(len(MEMORY)):
            registered = made.start(
                "register", "flwr", "supernode", "register", keys / f"node-{number}.pub", "loop"
            )
            assert registered.wait(120) == 0, made.logs()
        yield made
    finally:
        made.close()


def test_same_bits_behind_tls_and_authentication(
    deployment: Deployment, keys: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    for number, memory in enumerate(MEMORY):
        # One of them is Flower's own: both kinds speak the same language.
        settings, key = f"memory='{memory}'", keys / f"node-{number}"
        deployment.supernode(number, settings, key, plain=number == 1)
        shutil.copy(keys / f"node-{number}.pub", tmp_path / f"{number}.pub")
    policy = {"flower": {"keys": str(tmp_path)}}
    deployment.run(app_of(tmp_path, engine=policy)).wait(600)
    result = result_of(tmp_path, deployment)
    assert result["state_sha256"] == expected["state_sha256"]
    assert result["refused"] == []


def test_a_node_whose_key_is_not_registered_stays_outside(
    deployment: Deployment, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(stranger)]
    subprocess.run(command, check=True)
    with pytest.raises(AssertionError, match="does not take this node"):
        deployment.supernode(7, "memory='1MB'", stranger)
    assert "joined" not in deployment.log("supernode-7")


def test_a_client_that_does_not_know_the_authority_is_turned_away(
    deployment: Deployment, tmp_path: Path
) -> None:
    config = deployment.home / "config.toml"
    text = config.read_text()
    try:
        config.write_text(re.sub("root-certificates.*", "insecure = true", text))
        done = deployment.start("plain", "flwr", "ls", "loop")
        assert done.wait(120) != 0
    finally:
        config.write_text(text)
