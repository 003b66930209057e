"""The federation: the round loop. The place to start reading.

config --> fleet, method, data, engine
each round:  fleet.sample --> method.plan --> engine.train --> method.merge --> evaluate, save
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from sizewise.common.structure import plain
from sizewise.config import Config
from sizewise.engines import Engine
from sizewise.errors import BudgetTooSmall, NobodyCanTrain, NothingMerged, UpdateRefused
from sizewise.exchange import compression
from sizewise.exchange.plan import Plan, Refusal, Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State, sha256
from sizewise.exchange.view import View, check, size_in_bytes, view_in_bytes
from sizewise.families.base import Method
from sizewise.fleet import clock
from sizewise.fleet.attackers import Attackers, drawn
from sizewise.fleet.clock import Clock
from sizewise.fleet.devices import Fleet
from sizewise.runs import sample_privacy
from sizewise.runs.benefit import Benefit, Validation
from sizewise.runs.folder import Best, RunFolder, Totals
from sizewise.runs.private_rounds import PrivateRounds
from sizewise.runs.ranking import ranking
from sizewise.steps.metrics import perplexity
from sizewise.training.evaluation import Score
from sizewise.training.loop import workload

Observer = Callable[[Mapping[str, Any], Totals], object]
"""A callback: called after each round with its line of the history and the totals.

If it returns True, the run ends with that round. What it raises ends the run, too, and comes out of
`Federation.run`; the run folder can be resumed.
"""

ASKED = "a callback asked for it"
"""Why a run ended before its last round."""


@dataclass
class RoundLog:
    """What happened in one round, gathered while its updates stream past."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    remembered: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Federation:
    """A run: a method, a fleet, an engine that does the devices' work, a folder for the results."""

    config: Config
    method: Method
    fleet: Fleet
    engine: Engine
    folder: RunFolder
    begin: Callable[[], State] | None = None
    """Gives the state of the first round; default: the method's `setup`."""
    validation: Validation | None = None
    """What devices validate on, if they do."""
    privacy: PrivateRounds | None = None
    """What hides devices in the merged model, if something does."""

    def run(self, *observers: Observer) -> dict[str, Any]:
        """Train from the newest durable round to the last, and return the result.

        It ends earlier when an observer asks for it, or when `stop.patience` is at its end.

        Raises:
            NothingMerged: All rounds are done, and no update of them could be merged.
        """
        state, totals = self.folder.restore() or ((self.begin or self.method.setup)(), Totals())
        stopped = self.out_of_patience(totals)
        while stopped is None and totals.rounds < self.config.rounds:
            state, totals, line = self.round(state, totals, totals.rounds)
            asked = [observe(line, totals) is True for observe in observers]
            stopped = self.out_of_patience(totals) or (ASKED if any(asked) else None)
        if not self.due(totals.rounds - 1, self.config.engine.save_every):
            self.folder.save(state, totals)
        result = self.result(state, totals, stopped)
        self.folder.finish(state, result)
        if result["error"] is not None:
            raise NothingMerged(result["error"])
        return result

    def round(
        self, state: State, totals: Totals, round_index: int
    ) -> tuple[State, Totals, dict[str, Any]]:
        """Do one round, and make it durable if that is due."""
        start, log, benefit = time.perf_counter(), RoundLog(), None
        plans = list(self.plans(state, round_index, log))
        state = self.merge(state, self.updates(state, plans, log), round_index)
        state = self.folder.remembering(state, log.remembered)
        totals = add_up(totals, log.lines)
        line = {"round": round_index + 1, **summary(log.lines)}
        if self.privacy is not None:
            line["privacy"] = self.privacy.line(state)
        if self.config.recipe.sample_clip is not None:
            totals = replace(totals, passes=sample_privacy.added(totals.passes, plans))
            line["sample_privacy"] = self.spent_on_samples(totals)
        lasted = self.clock.round(entry.get("device_seconds") for entry in log.lines)
        if lasted is not None:
            line["device_seconds"] = lasted
        if self.due(round_index, self.config.recipe.eval_every):
            scores = self.engine.evaluate(state)
            accuracy, sizes = self.rated(scores)
            totals = replace(totals, accuracy=accuracy, sizes=sizes)
            # JSON can hold finite numbers only.
            losses = {n: s.loss if math.isfinite(s.loss) else None for n, s in scores.items()}
            line |= {"accuracy": totals.accuracy, "sizes": sizes, "test_loss": losses}
            line |= self.perplexities(sizes)
            if self.validation is not None:
                benefit = self.validation.measured(self.method, self.engine, state, round_index)
            if benefit is not None:
                totals = judged(totals, benefit, round_index + 1, self.config.stop.min_delta)
                line["validation"] = totals.validation
        seconds = time.perf_counter() - start
        totals = replace(totals, rounds=round_index + 1, seconds=totals.seconds + seconds)
        line["seconds"] = seconds
        self.folder.log(log.lines, line)
        if benefit is not None:
            self.folder.describe(benefit)
            if totals.since == 0:
                owners = (model.owner for model in self.method.deploy(state).values())
                self.folder.keep(state, totals, {own for own in owners if own is not None})
        if self.due(round_index, self.config.engine.save_every):
            self.folder.save(state, totals)
        return state, totals, line

    def merge(self, state: State, updates: Iterable[Update], round_index: int) -> State:
        """Return the next state."""
        if self.privacy is None:
            return self.method.merge(state, updates)
        return self.privacy.merge(state, updates, round_index)

    def spent_on_samples(self, totals: Totals) -> dict[str, Any] | None:
        """Return what single samples have spent, where gradients are clipped sample by sample."""
        recipe = self.config.recipe
        if recipe.sample_clip is None:
            return None
        return sample_privacy.spent(totals.passes, recipe, self.fleet, self.config.rounds)

    def due(self, round_index: int, every: int) -> bool:
        """Return whether something that is done every so many rounds, and at the end, is due."""
        return (round_index + 1) % every == 0 or round_index + 1 == self.config.rounds

    def out_of_patience(self, totals: Totals) -> str | None:
        """Return why a run ends early by its validation score; None if it goes on."""
        patience, best = self.config.stop.patience, totals.best
        if patience is None or best is None or totals.since < patience:
            return None
        row = "an evaluation" if totals.since == 1 else f"{totals.since} evaluations in a row"
        return f"{row} without a better validation score than that of round {best.round}"

    def rated(self, scores: Mapping[str, Score]) -> tuple[float, dict[str, float]]:
        """Return the one figure to show for a run, and the metric of each deployed size.

        Where silos have labels of their own, each size has a figure for each of them. What counts
        is how well the best size does on a silo, in the mean over the silos.
        """
        task = self.method.task
        silos = task.silos or ("",)
        found = {size: score.values(task.metric, len(silos)) for size, score in scores.items()}
        if not task.silos:
            sizes = {size: values[0] for size, values in found.items()}
            return self.method.summary_metric(sizes), sizes
        named = {
            f"{size} on {silo}": value
            for size, values in found.items()
            for silo, value in zip(silos, values, strict=True)
        }
        return fmean(max(values) for values in zip(*found.values(), strict=True)), named

    def perplexities(self, sizes: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
        """Return the perplexity of each size, where next tokens are measured by likelihood."""
        if self.method.task.metric != "likelihood":
            return {}
        return {"perplexity": {size: perplexity(value) for size, value in sizes.items()}}

    def plans(self, state: State, round_index: int, log: RoundLog) -> Iterator[Plan]:
        """Yield the plans of the devices sampled for a round; note those that cannot take part."""
        seed = self.config.seed if self.privacy is None else self.privacy.seed
        for sampled in self.fleet.sample(seed, round_index):
            device = self.attackers.seen(sampled)
            try:
                yield self.method.plan(state, device, round_index)
            except BudgetTooSmall as error:
                refusal = Refusal(device.id, round_index, device.group, str(error))
                lacking = {"budget": error.budget, "predicted": error.needed}
                log.lines.append({**refusal_line(refusal), **lacking})

    def updates(self, state: State, plans: list[Plan], log: RoundLog) -> Iterator[Update]:
        """Yield the updates of a round that may be merged, in the order of the plans."""
        trained = self.engine.train(state, plans)
        sent = self.attackers.at_work(state.tensors, trained, partial(self.view, state))
        for plan, outcome in zip(plans, sent, strict=True):
            simulated: dict[str, float] = {}
            if isinstance(outcome, Update):
                try:
                    view = self.method.submodels.view(plan.submodel)
                    traffic = self.method.traffic(plan, outcome.samples)
                    rows = self.view(state, outcome)
                    down = view_in_bytes(view, state.tensors) + size_in_bytes(traffic.down)
                    line = update_line(outcome, down, self.flops(outcome))  # Bytes as sent.
                    recipe = self.config.recipe
                    outcome = compression.decoded(outcome, view, state.tensors, recipe)
                    check(outcome.tensors, rows, state.tensors)
                    traffic.check(outcome.sample_payload)
                    device = self.fleet.device(plan.device, plan.round)
                    took = clock.seconds(device, down, line["flops"], line["bytes_up"])
                    simulated = {} if took is None else {"device_seconds": took}
                    self.clock.check(took)
                except UpdateRefused as error:
                    outcome = Refusal(plan.device, plan.round, plan.group, str(error))
            if isinstance(outcome, Refusal):
                log.lines.append({**refusal_line(outcome), **simulated})
                continue
            log.lines.append({**line, **simulated})
            if outcome.device_state:
                log.remembered[plan.device] = self.folder.remember(outcome)
            yield outcome

    def view(self, state: State, update: Update) -> View:
        """Return where the tensors of an update live."""
        view = self.method.submodels.view(update.plan.submodel)
        return with_rows(view, update.rows, state.tensors)

    @cached_property
    def attackers(self) -> Attackers:
        """Devices that attack, in simulation."""
        return drawn(self.config.fleet.attack, self.fleet, self.config.seed)

    @property
    def clock(self) -> Clock:
        """When rounds end, in simulated time."""
        return Clock(self.config.fleet.deadline)

    def flops(self, update: Update) -> int:
        """Return what an update cost its device in floating-point operations."""
        submodel, recipe = update.plan.submodel, self.config.recipe
        return sum(
            self.method.flops_per_sample(submodel, stage)
            * workload(stage, update.samples, recipe)[1]
            for stage in update.plan.stages
        )

    def result(self, state: State, totals: Totals, stopped: str | None = None) -> dict[str, Any]:
        """Return the object that `--json` prints; `stopped` says why a run ended early."""
        budgets = {device.group: device.memory for device, _, _ in self.fleet.classes()}
        return {
            "accuracy": totals.accuracy,
            "sizes": dict(totals.sizes),
            "rounds": totals.rounds,
            "bytes_up": totals.bytes_up,
            "bytes_down": totals.bytes_down,
            "peak_bytes": {group: totals.peak_bytes.get(group) for group in budgets},
            "budget_bytes": budgets,
            "flops": totals.flops,
            "seconds": round(totals.seconds, 3),
            "refused": [dict(refusal) for refusal in totals.refused],
            "state_sha256": sha256(state.tensors),
            "run_dir": str(self.folder.path),
            "metric": self.method.task.metric,
            **self.perplexities(totals.sizes),
            **ranking(totals.accuracy, totals.sizes),
            "validation": dict(totals.validation) or None,
            "best_round": None if totals.best is None else plain(totals.best),
            "stopped": stopped if totals.rounds < self.config.rounds else None,
            "privacy": None if self.privacy is None else self.privacy.result(),
            "sample_privacy": self.spent_on_samples(totals),
            "error": totals.failure,
        }


def judged(totals: Totals, benefit: Benefit, rounds: int, min_delta: float) -> Totals:
    """Return the totals with what devices got after so many rounds, and whether it is the best."""
    totals = replace(totals, validation=benefit.summary(), since=totals.since + 1)
    if totals.best is not None and not benefit.score > totals.best.score + min_delta:
        return totals
    best = Best(rounds, benefit.score, totals.accuracy or 0.0, totals.sizes)
    return replace(totals, best=best, since=0)


def check_fleet(method: Method, fleet: Fleet, state: State) -> None:
    """Raise NobodyCanTrain unless some device class can take part, given the state at the start.

    All are looked at: a class that joins later must not end the run with an error.
    """
    refusals = []
    for device, round_index, _ in fleet.classes():
        try:
            method.plan(state, device, round_index)
        except BudgetTooSmall as error:
            refusals.append(error)
    if len(refusals) < len(list(fleet.classes())):
        return
    raise NobodyCanTrain(
        f"no device can take part: the largest budget is "
        f"{max(refusal.budget for refusal in refusals):,} bytes and the method needs at least "
        f"{min(refusal.needed for refusal in refusals):,}; "
        f"raise a budget, or choose a smaller model, batch or method"
    )


def update_line(update: Update, bytes_down: int, flops: int) -> dict[str, Any]:
    """Return the line of `updates.jsonl` for an update."""
    plan = update.plan
    return {
        "round": plan.round + 1,
        "device": plan.device,
        "group": plan.group,
        "size": plan.submodel.label,
        "submodel": plain(plan.submodel),
        "stages": [stage.work.label for stage in plan.stages],
        "levers": [stage.levers.label for stage in plan.stages],
        "budget": plan.budget,
        "predicted": plan.predicted,
        "peak_bytes": update.peak_bytes,
        "bytes_down": bytes_down,
        "bytes_up": size_in_bytes(update.tensors) + size_in_bytes(update.sample_payload),
        "samples": update.samples,
        "steps": update.steps,
        "flops": flops,
        "loss": update.loss,
        "seconds": round(update.seconds, 6),
        "refused": None,
    }


def refusal_line(refusal: Refusal) -> dict[str, Any]:
    """Return the line of `updates.jsonl` for a device that did not take part."""
    return {
        "round": refusal.round + 1,
        "device": refusal.device,
        "group": refusal.group,
        "refused": refusal.reason,
    }


def summary(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums and means of a round's updates."""
    merged = [line for line in lines if line["refused"] is None]
    samples = sum(line["samples"] for line in merged)
    loss = sum(line["loss"] * line["samples"] for line in merged)
    return {
        "devices": len(merged),
        "refused": sum(line["refused"] is not None for line in lines),
        "train_loss": loss / samples if samples else None,
        **{key: sum(line[key] for line in merged) for key in ("bytes_up", "bytes_down", "flops")},
    }


def add_up(totals: Totals, lines: Iterable[Mapping[str, Any]]) -> Totals:
    """Return the totals with a round's lines added."""
    lines = list(lines)
    sums = summary(lines)
    peaks = dict(totals.peak_bytes)
    refused = {(r["group"], r["reason"]): dict(r) for r in totals.refused}
    for line in lines:
        group, reason = line["group"], line["refused"]
        if reason is None:
            peaks[group] = max(peaks.get(group, 0), line["peak_bytes"] or 0)
            continue
        blank = {"group": group, "reason": reason, "times": 0, "devices": []}
        entry = refused.setdefault((group, reason), blank)
        entry["times"] += 1
        if line["device"] not in entry["devices"] and len(entry["devices"]) < SHOWN_REFUSED:
            entry["devices"] = sorted([*entry["devices"], line["device"]])
    return replace(
        totals,
        bytes_up=totals.bytes_up + sums["bytes_up"],
        bytes_down=totals.bytes_down + sums["bytes_down"],
        flops=totals.flops + sums["flops"],
        peak_bytes=peaks,
        refused=tuple(refused.values()),
    )


SHOWN_REFUSED = 10
"""Devices named in a result for each reason to refuse; the logs name them all."""
