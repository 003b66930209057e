"""The workloads on Flower's simulation: a ServerApp, a ClientApp and Ray actors.

    python flower_run.py a|b|c [--workers N] [--rounds N]

A Ray actor takes one CPU and there are as many as `--workers` says. Data and model stay in an actor
from one client to the next, so that nobody reads or builds them twice.
"""

import os
import sys
from pathlib import Path

# Read when flwr and ray are imported: nothing may be sent out, and Ray's own log would cost time.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Actors are new processes that have to find the modules of this folder.
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import work
from flower_client import client, kept


def add_up(replies: list[RecordDict], weight: str) -> MetricRecord:
    """Add the counts of a round's clients, where Flower would take their mean."""
    metrics = [reply["metrics"] for reply in replies]
    keys = ("num-examples", "steps", "clients")
    return MetricRecord({key: sum(metric[key] for metric in metrics) for key in keys})


def main() -> None:
    """Run one workload and print its report."""
    given = work.arguments("Flower's simulation")
    workload, report = given.workload, work.Report()
    name = sys.argv[1]
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        # The server's side of the simulation runs in a thread of this process.
        _, data, model, _ = kept(name)
        strategy = FedAvg(
            fraction_train=workload.per_round / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.per_round,
            min_available_nodes=workload.clients,
            train_metrics_aggr_fn=add_up,
        )

        def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if number == 0:
                report.began = work.since_start()
                return None
            report.mark()
            if number == workload.rounds:
                model.load_state_dict(arrays.to_torch_state_dict())
                report.loss, report.accuracy = work.score(model, data)
            return None

        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=workload.rounds,
            train_config=ConfigRecord({"workload": name}),
            evaluate_fn=after_round,
        )
        for counts in result.train_metrics_clientapp.values():
            report.count(counts["clients"], counts["steps"], counts["num-examples"])

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": given.workers}}
    run_simulation(server, client, workload.clients, backend_config=backend)
    report.print()


if __name__ == "__main__":
    main()
