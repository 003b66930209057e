"""A Flower deployment on loopback: a SuperLink and SuperNodes as processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 240.0
"""Seconds to wait for anything; a quiet machine needs a few, a busy one must not fail a test."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise every run would install the app's dependencies first, from the network.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """Flower's processes, their logs, and an end to all of them.

    Attributes:
        address: Where the SuperLink listens.
        home: Flower's own folder, with the connections that `flwr` knows.
        processes: All that were started here.
    """

    def __init__(self, folder: Path, certificates: Path | None = None) -> None:
        self._folder, self._certificates = folder, certificates
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        scripts = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            **QUIET,
            "FLWR_HOME": str(self.home),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        trust = "insecure = true"
        if certificates is not None:
            trust = f'root-certificates = "{certificates / "ca.crt"}"'
        config = f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "{self.address}"\n'
        (self.home / "config.toml").write_text(config + trust + "\n")

    def start(
        self, name: str, *command: str | Path, group: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that writes to a log of this name, perhaps in a cgroup."""
        if group is not None:
            enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            command = ("sh", "-c", enter, "sh", *command)
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it listens."""
        trust: Sequence[str | Path] = ["--insecure"]
        if (pki := self._certificates) is not None:
            trust = ["--ssl-ca-certfile", pki / "ca.crt", "--ssl-certfile", pki / "server.pem"]
            trust = [*trust, "--ssl-keyfile", pki / "server.key", "--enable-supernode-auth"]
        place = ["--host", "127.0.0.1", "--port", str(self._port)]
        place += ["--database", str(self._folder / "superlink.db")]
        process = self.start("superlink", "flower-superlink", *trust, *place)
        self.wait_for(self._listening, "the SuperLink to listen", process)
        return process

    def _listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def supernode(
        self,
        number: int,
        settings: str,
        key: Path | None = None,
        patience: float = PATIENCE,
        plain: bool = False,
        group: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start the node of a device, ours or Flower's, and wait until the SuperLink knows it."""
        name, said = f"supernode-{number}", "SuperNode ID" if plain else "joined as node"
        before = self.log(name).count(said)
        trust: Sequence[str | Path] = ["--insecure"]
        if self._certificates is not None and key is not None:
            trust = ["--root-certificates", self._certificates / "ca.crt"]
            trust = [*trust, "--auth-supernode-private-key", key]
        ours = [sys.executable, "-m", "sizewise", "flower", "node"]
        ours += ["--poll", "0.2", "--heartbeat", "10"]
        flowers = ["flower-supernode", "--host", "127.0.0.1", "--port", str(free_port())]
        process = self.start(
            name,
            *(flowers if plain else ours),
            *(*trust, "--superlink", self.address),
            *("--node-config", f"partition-id={number} {settings}"),
            group=group,
        )

        def known() -> bool:
            return self.log(name).count(said) > before

        self.wait_for(known, f"{name} to be known", process, patience)
        return process

    def run(self, app: Path) -> subprocess.Popen[bytes]:
        """Start an app on this deployment."""
        return self.start("run", "flwr", "run", app, "loop", "--stream")

    def wait_for(
        self,
        happened: Callable[[], object],
        what: str,
        process: subprocess.Popen[bytes] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Wait until something happened; fail with all logs if it does not, or a process ends."""
        end = time.monotonic() + patience
        while not happened():
            ended = process is not None and process.poll() is not None
            if time.monotonic() > end or (ended and not happened()):
                raise AssertionError(f"waited in vain for {what}\n{self.logs()}")
            time.sleep(0.1)

    def log_path(self, name: str) -> Path:
        """Return where a process logs."""
        return self._folder / f"{name}.log"

    def log(self, name: str) -> str:
        """Return what a process has logged so far."""
        path = self.log_path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """Return the ends of all logs, for somebody who wonders what went wrong."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"---- {path.name}\n{self.log(path.stem)[-3000:]}" for path in paths)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process and all that it started, as a power cut would."""
        for pid in [process.pid, *descendants(process.pid)]:
            end(pid)
        process.wait(PATIENCE)

    def close(self) -> None:
        """End everything that was ever started here, orphans included."""
        marker = f"FLWR_HOME={self.home}".encode()
        for _ in range(3):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    if marker in (entry / "environ").read_bytes().split(b"\0"):
                        end(int(entry.name))
                except OSError:
                    continue  # It ended by itself, or is somebody else's.
        for process in self.processes:
            process.wait(PATIENCE)


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Yield a cgroup of at most so many bytes, inside that of this process; OSError: none here."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path.lstrip("/") for _, names, path in rows for name in names.split(",")}
    top, controller = Path("/sys/fs/cgroup"), "memory" if "memory" in own else ""
    folder = top / controller / own[controller] / f"sizewise-test-{os.getpid()}"
    folder.mkdir()
    try:
        name = "memory.limit_in_bytes" if controller else "memory.max"
        (folder / name).write_text(str(-(-limit // 4096) * 4096))  # In whole pages.
        yield folder
    finally:
        folder.rmdir()


def end(pid: int) -> None:
    """Kill one process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def descendants(pid: int) -> list[int]:
    """Return all processes that a process started, and those that they started."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = {int(row.split()[0]): int(row.split()[1]) for row in table.stdout.splitlines()}
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]
