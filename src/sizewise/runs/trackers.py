"""Experiment trackers: after each round, its figures go to TensorBoard, Weights & Biases or MLflow.

    sizewise run my.toml --track tensorboard --track wandb

The run folder is complete without them. All three write to disk only, inside the run folder;
nothing is sent anywhere (`wandb sync` does that, if you ask for it). Each needs its own package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from sizewise.common.structure import flat, nearest
from sizewise.config import Config
from sizewise.errors import ConfigError
from sizewise.runs.federation import Observer
from sizewise.runs.folder import Totals

Name = Literal["tensorboard", "wandb", "mlflow"]

VALIDATION = ("score", "mean", "worst_tenth", "deviation")
"""What is tracked of devices that validate."""

Log = Callable[[Mapping[str, float], int], None]
"""Takes figures by name, and the round."""


def checked(names: Sequence[str]) -> list[Name]:
    """Return names of trackers, each once.

    Raises:
        ConfigError: One is not known, or its package is not installed.
    """
    for name in names:
        if name not in get_args(Name):
            raise ConfigError(f"there is no tracker {name!r}; {nearest(name, get_args(Name))}")
        try:
            import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
        except ImportError as error:
            raise ConfigError(
                f"--track {name} needs a package that is not installed ({error}); "
                f"try: pip install {'mlflow-skinny' if name == 'mlflow' else name}"
            ) from None
    return list(dict.fromkeys(names))  # type: ignore[arg-type]


def figures(line: Mapping[str, Any], totals: Totals) -> dict[str, float]:
    """Return what is tracked of a round: numbers by name."""
    validation = line.get("validation", {})
    spent = line.get("privacy", {}).get("epsilon", {})
    found: dict[str, Any] = {
        "accuracy": line.get("accuracy"),
        "train_loss": line["train_loss"],
        "devices": line["devices"],
        "refused": line["refused"],
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "flops": totals.flops,
        "seconds": totals.seconds,
        "device_seconds": line.get("device_seconds"),
        "epsilon": max(spent.values(), default=None),
        **{f"sizes/{size}": score for size, score in line.get("sizes", {}).items()},
        **{f"peak_bytes/{group}": peak for group, peak in totals.peak_bytes.items()},
        **{f"validation/{name}": validation.get(name) for name in VALIDATION},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


@contextmanager
def opened(names: Sequence[Name], config: Config, folder: Path) -> Iterator[Observer]:
    """Yield an observer of a run that tells all the trackers named; each notes the run's config."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    with ExitStack() as stack:
        logs: list[Log] = [stack.enter_context(makers[name](config, folder)) for name in names]

        def observe(line: Mapping[str, Any], totals: Totals) -> None:
            for log in logs:
                log(figures(line, totals), line["round"])

        yield observe


@contextmanager
def _tensorboard(config: Config, folder: Path) -> Iterator[Log]:
    # Its types depend on whether tensorboard is installed.
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(folder / "tensorboard")

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(config: Config, folder: Path) -> Iterator[Log]:
    import wandb

    place = {"name": folder.name, "dir": str(folder), "mode": "offline"}
    run = wandb.init(project="sizewise", config=config.to_dict(), **place)
    try:
        yield lambda values, step: run.log(dict(values), step=step)
    finally:
        run.finish()


@contextmanager
def _mlflow(config: Config, folder: Path) -> Iterator[Log]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    mlflow.set_experiment("sizewise")
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({key: str(value) for key, value in flat(config.to_dict())})
        yield lambda values, step: mlflow.log_metrics(
            {name.replace("%", " percent"): value for name, value in values.items()}, step=step
        )
