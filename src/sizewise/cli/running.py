"""Commands that train one model: `run` and `resume`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from sizewise.cli.options import AsJson, ConfigFile, Overrides, Trackers
from sizewise.cli.training import simulate, train


def run(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    engine: Annotated[
        Literal["local", "flower"], typer.Option(help="flower: on simulated Flower nodes.")
    ] = "local",
    track: Trackers = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Train one run, in a folder of its own.

    Without a file, it is the embedded config: handwritten digits, twenty devices of four sizes.
    """
    from sizewise import config as configs
    from sizewise.runs import session

    chosen = configs.load(config, overrides)
    if engine == "flower":
        simulate(chosen, out, as_json, track)
    else:
        train(session.started(chosen, out), as_json, track)


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.")],
    overrides: Overrides = [],  # noqa: B006
    track: Trackers = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, from its last durable round.

    --set rounds=N makes it longer; engine.workers, engine.save_every, engine.flower and data.root
    may change as well. Anything else would mix two runs.
    """
    from sizewise.runs import session

    train(session.resumed(run_dir, overrides=overrides), as_json, track)
