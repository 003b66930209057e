"""The server's side of a Flower run: a ServerApp that starts a run, or goes on with it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sizewise import config as configs
from sizewise.config import Config
from sizewise.errors import TooFewUpdates
from sizewise.fleet.attacks import refuse_attackers
from sizewise.fleet.devices import GroupConfig, class_name
from sizewise.flower.engine import FlowerEngine
from sizewise.flower.roster import Member
from sizewise.runs import preparation, session
from sizewise.runs.federation import Federation, Observer
from sizewise.runs.folder import Totals


def make_app(config: Path) -> ServerApp:
    """Return the ServerApp of a config file.

    Flower's run config has two keys: `out`, the run folder, which is resumed if it exists, and
    `set`, further values such as "rounds=3 recipe.lr=0.05", separated by blanks.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        overrides = str(context.run_config.get("set", "")).split()
        chosen = configs.load(config, overrides)

        def tell(line: Mapping[str, Any], totals: Totals) -> None:
            accuracy = f"{totals.accuracy:.1%}" if totals.accuracy is not None else "unknown"
            print(
                f"sizewise: round {line['round']} of {chosen.rounds}, accuracy {accuracy}, "
                f"{line['devices']} updates, {line['refused']} refused, {line['seconds']:.1f} s",
                flush=True,
            )

        result = serve(grid, chosen, Path(str(context.run_config["out"])), tell)
        print("sizewise: result", json.dumps(result), flush=True)

    return app


def serve(
    grid: Grid,
    config: Config,
    out: Path,
    observe: Observer = lambda line, totals: None,
    poll: float = 0.5,
) -> dict[str, Any]:
    """Run a federation on a grid, from where its folder is, and return the result.

    The config is that of a new run; an existing folder knows its own. `poll` are the seconds
    between two looks at what came.
    """
    engine = FlowerEngine(grid, poll)
    failures = 0

    def observed(line: Mapping[str, Any], totals: Totals) -> None:
        nonlocal failures
        failures = 0
        observe(line, totals)

    with _opened(engine, config, out) as federation:
        while True:
            try:
                return federation.run(observed)
            except TooFewUpdates:
                # Nothing of that round was kept: it is done again, from the last durable one.
                failures += 1
                if failures >= federation.config.engine.flower.attempts:
                    raise
                engine.settle()


@contextmanager
def _opened(engine: FlowerEngine, config: Config, out: Path) -> Iterator[Federation]:
    """Yield the federation of a folder, new or not, once enough devices are there."""
    exists = (out / "config.toml").is_file()
    chosen = configs.load(out / "config.toml") if exists else config
    refuse_attackers(chosen.fleet.attack)  # Before anybody is waited for.
    fleet, policy = chosen.fleet, chosen.engine.flower
    wanted = policy.nodes or sum(group.count for group in fleet.group) or fleet.devices
    engine.roster.expect(chosen)
    # A run that was under way goes on without nodes that are gone for good.
    engine.roster.wait(wanted, policy.wait, policy.minimum if exists else wanted)
    if exists:
        opening = session.resumed(out, engine=engine)
    else:
        chosen = told(chosen, engine.roster.members.values())
        opening = session.started(chosen, out, engine=engine)
    with opening as federation:
        yield federation


def told(config: Config, members: Iterable[Member]) -> Config:
    """Return the config whose devices have the bytes that their nodes say they have.

    A device whose node said nothing, or is not there yet, keeps what the config gives it. The
    result is what the run folder keeps: budgets decide about sizes of models, so they are fixed
    for a run. A node that has less by the time it is asked refuses; one that has more, rests.
    """
    memories = {member.device: member.memory for member in members if member.memory is not None}
    if not memories:
        return config
    fleet = preparation.prepare(config).fleet
    groups: list[GroupConfig] = []
    for start, join, group in zip(fleet.starts, fleet.joins, fleet.groups, strict=True):
        for number in range(start, start + group.count) if join == 0 else ():
            memory = memories.get(number, group.memory)
            kind = replace(group, count=1)
            if memory != group.memory:
                kind = replace(kind, memory=memory, name=class_name(memory), ratio=None)
            if groups and replace(groups[-1], count=1) == kind:
                groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
            else:
                groups.append(kind)
    if tuple(groups) == fleet.groups[: len(groups)]:
        return config
    chosen = replace(config.fleet, budgets=(), ratios=(), scenario=None, group=tuple(groups))
    return replace(config, fleet=chosen)
