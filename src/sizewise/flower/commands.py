"""The commands of `sizewise flower`, but for `new`, which takes a config as `run` does."""

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from sizewise.errors import ConfigError

flower = typer.Typer(help="Many machines: apps and nodes for Flower.", no_args_is_help=True)

SuperLink = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink listens.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do without TLS: for a trial only.")]
Roots = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The authority that signed the SuperLink's key.")
]
Poll = Annotated[float, typer.Option(min=0.01, help="Seconds between two looks for a message.")]

Heartbeat = Annotated[
    float, typer.Option(min=10, max=1800, help="Seconds between signs of life; two missed: gone.")
]


@flower.command()
def node(
    node_config: Annotated[
        str, typer.Option(help="Who it is: \"partition-id=0 memory='20MB'\"; see docs/flower.md.")
    ],
    superlink: SuperLink = "127.0.0.1:8000",
    insecure: Insecure = False,
    root_certificates: Roots = None,
    key: Annotated[
        Path | None,
        typer.Option("--auth-supernode-private-key", metavar="FILE", help="The node's key."),
    ] = None,
    poll: Poll = 0.5,
    heartbeat: Heartbeat = 30.0,
    trust_app: Annotated[
        bool, typer.Option("--trust-app", help="Import modules of the app that the server sends.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Be a flower-supernode: a new process for each message.")
    ] = False,
) -> None:
    """Be a node: one process with everything imported, which forks for each message."""
    check_installed()
    if plain or not _fits():
        _be_plain(superlink, insecure, root_certificates, key, node_config)
    from sizewise.flower import usage

    settings = read_settings(node_config)
    check_room(settings.get("memory"), usage.limit())
    from sizewise.flower import runner
    from sizewise.flower.connection import Connection, Place

    runner.start_logging()
    place = Place(superlink, insecure, root_certificates, key, heartbeat)
    runner.Runner(Connection(place, settings), poll, trust_app).run()


@flower.command()
def box(
    devices: Annotated[str, typer.Option(metavar="0-199", help="The devices that it is.")],
    superlink: SuperLink = "127.0.0.1:8000",
    insecure: Insecure = False,
    root_certificates: Roots = None,
    node_config: Annotated[str, typer.Option(help="For all: \"memory='20MB'\".")] = "",
    poll: Poll = 0.5,
    heartbeat: Heartbeat = 30.0,
    faults: Annotated[
        str,
        typer.Option(help='Shares that fail: "die=0.1 lose=0.1 late=0.1 seconds=30"; see docs.'),
    ] = "",
) -> None:
    """Be a fleet in a box: many nodes in one process, to try round policies with."""
    check_installed()
    from sizewise.flower import box as boxes
    from sizewise.flower import runner
    from sizewise.flower.connection import Place
    from sizewise.flower.faults import read_faults

    numbers, settings = boxes.read_numbers(devices), read_pairs(node_config, "--node-config")
    chosen = read_faults(read_pairs(faults, "--faults"))
    runner.start_logging()
    place = Place(superlink, insecure, root_certificates, heartbeat=heartbeat)
    boxes.Box(place, numbers, settings, poll, chosen).run()


@flower.command(name="status")
def show_status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show who is there, what each device does, and what it cost so far."""
    from sizewise.common.structure import plain
    from sizewise.flower import status

    found = status.read(run_dir)
    print(json.dumps(plain(found)) if as_json else status.text(found))


def check_installed() -> None:
    """Raise ConfigError unless Flower is here."""
    if find_spec("flwr") is None:
        raise ConfigError("a node needs Flower; run `pip install 'sizewise[flower]'`")


def read_pairs(text: str, option: str) -> dict[str, Any]:
    """Return what `name=value` pairs say, as Flower reads them."""
    import click
    from flwr.common.config import parse_config_args

    try:
        return parse_config_args([text])
    except (click.ClickException, ValueError, OSError) as error:
        raise ConfigError(f"{option} {text!r} cannot be read: {error}") from None


def read_settings(text: str) -> dict[str, Any]:
    """Return what an owner says of a node; raise ConfigError if it cannot be one."""
    from flwr.app import Context, RecordDict

    from sizewise.flower.node import device_of

    settings = read_pairs(text, "--node-config")
    device_of(Context(0, 0, settings, RecordDict(), {}))
    return settings


def check_room(memory: object, limit: int | None) -> None:
    """Raise ConfigError if a container is too small for a node; torch would not even be imported.

    Args:
        memory: What the owner set; None if nothing.
        limit: What the process may take in all; None: no limit.
    """
    from sizewise.common.structure import parse_bytes
    from sizewise.flower import usage

    wanted = 1 if memory in (None, "free") else parse_bytes(memory, "a node's memory")
    needed = usage.BASE + usage.RESERVE + wanted
    if limit is not None and needed > limit:
        raise ConfigError(
            f"a node with memory={memory!r} needs {needed:,} bytes: {usage.BASE:,} to wait, "
            f"{wanted:,} for a step, {usage.RESERVE:,} beside it; its container has {limit:,}; "
            f"give it more, or lower memory"
        )


def _fits() -> bool:
    """Return whether this Flower has the parts that the runner is made of."""
    try:
        from sizewise.flower import connection  # noqa: F401
    except ImportError as error:
        print(f"this Flower is another one ({error}); a plain node starts", file=sys.stderr)
        return False
    return True


def _be_plain(
    superlink: str, insecure: bool, roots: Path | None, key: Path | None, settings: str
) -> None:
    """Become a flower-supernode with the same settings."""
    program = shutil.which("flower-supernode", path=Path(sys.executable).parent)
    program = program or shutil.which("flower-supernode")
    if program is None:
        raise ConfigError("flower-supernode is not on the path; run `pip install flwr`")
    command = [program, "--superlink", superlink, "--node-config", settings]
    command += ["--insecure"] if insecure else []
    command += [] if roots is None else ["--root-certificates", str(roots)]
    command += [] if key is None else ["--auth-supernode-private-key", str(key)]
    os.execv(program, command)  # noqa: S606  (our own words, no shell)
