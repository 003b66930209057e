"""The workloads on sizewise, as a user would run them.

    python sizewise_run.py a|b|c [--workers N] [--rounds N]

Every round is checked, logged and made durable, as by default.
"""

import json
import tempfile
from pathlib import Path

import work
from sizewise import config as configs
from sizewise.common.heap import keep_freed
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.runs import session


def make_dataset(workload: work.Workload) -> Dataset:
    """Return a workload's data as sizewise takes it."""
    data = work.make_data(workload)
    channels = workload.image[0]
    return Dataset(
        "peers",
        data.train_inputs,
        data.train_labels,
        data.test_inputs,
        data.test_labels,
        tuple(map(str, range(work.CLASSES))),
        (work.MEAN,) * channels,
        (work.DEVIATION,) * channels,
    )


def make_config(
    workload: work.Workload, workers: int, together: int = 0, layout: str = "contiguous"
) -> Config:
    """Return the sizewise config of a workload; what is not named here is at its default."""
    model: dict[str, object] = {"name": workload.model}
    if workload.model == "mlp":
        model["args"] = {"hidden": [32]}
    return configs.from_dict(
        {
            "rounds": workload.rounds,
            "model": model,
            "data": {"name": "peers", "partition": "iid"},
            "fleet": {"devices": workload.clients, "per_round": workload.per_round},
            "method": {"name": "fedavg"},
            "recipe": {
                "lr": work.LEARNING_RATE,
                "momentum": 0.0,
                "weight_decay": 0.0,
                "batch": workload.batch,
                "eval_every": workload.rounds,
            },
            "engine": {"workers": workers, "together": together, "layout": layout},
        }
    )


def main(together: int = 0, layout: str = "contiguous") -> None:
    """Run one workload and print its report."""
    keep_freed()  # As `sizewise run` does.
    given = work.arguments("sizewise")
    workload, report = given.workload, work.Report()
    config = make_config(workload, given.workers, together, layout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        lines: list[dict[str, object]] = []
        with session.started(config, out, make_dataset(workload)) as federation:
            report.began = work.since_start()

            def observe(line: object, totals: object) -> None:
                report.mark()
                lines.append(dict(line))  # type: ignore[call-overload]

            result = federation.run(observe)
        # Counted from the log of what devices sent, not from what they were asked to do.
        for text in (out / "updates.jsonl").read_text().splitlines():
            update = json.loads(text)
            if update["refused"] is None:
                report.count(clients=1, steps=update["steps"], samples=update["samples"])
        report.accuracy = result["accuracy"]
        (report.loss,) = lines[-1]["test_loss"].values()  # type: ignore[attr-defined]
    report.print()


if __name__ == "__main__":
    main()
