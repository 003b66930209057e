"""`sizewise run --engine flower`: the Flower engine on Flower's own simulation of nodes, by Ray."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sizewise.config import Config
from sizewise.errors import ConfigError, EngineError
from sizewise.fleet.attacks import refuse_attackers
from sizewise.runs import preparation, session
from sizewise.runs.federation import Observer, check_fleet


def check_installed() -> None:
    """Raise ConfigError unless Flower and Ray are here."""
    for name, extra in (("flwr", "flower"), ("ray", "simulation")):
        if find_spec(name) is None:
            raise ConfigError(
                f"--engine flower needs the package {name!r}, which is not installed; "
                f"run `pip install 'sizewise[{extra}]'`, or leave --engine out"
            )


def run(config: Config, out: Path | None, observe: Observer) -> dict[str, Any]:
    """Run a federation on simulated Flower nodes, one for each device, and return the result."""
    check_installed()
    # What can be wrong shows now, before a hundred processes are there.
    refuse_attackers(config.fleet.attack)
    setting = preparation.prepare(config)
    check_fleet(setting.method, setting.fleet, setting.start)
    folder = (out or session.new_name(config)).absolute()
    if (folder / "config.toml").exists():
        raise ConfigError(f"{str(folder)!r} has a run already; choose another --out")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # It warns otherwise.
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from sizewise.flower import node as flower_node
    from sizewise.flower import server as flower_server

    server, results, errors = ServerApp(), list[dict[str, Any]](), list[Exception]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            results.append(flower_server.serve(grid, config, folder, observe))
        except Exception as error:
            errors.append(error)
            raise

    workers = config.engine.workers
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": workers}}
    try:
        run_simulation(server, flower_node.make_app(), setting.fleet.total, backend_config=backend)  # type: ignore[arg-type]
    except RuntimeError as error:
        print(error, file=sys.stderr)
    if errors:
        raise errors[0]
    if not results:
        raise EngineError("Flower's simulation ended without a result; see its messages above")
    return results[0]
