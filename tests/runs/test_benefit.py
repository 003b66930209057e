"""Who benefits: figures by hand, the same as a slow loop over devices gives, for every method."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from sizewise import config as configs
from sizewise.data.partitions import Draw, Partition
from sizewise.data.silos import join
from sizewise.engines.device_runner import DeviceRunner, training_batches
from sizewise.engines.local import LocalEngine
from sizewise.exchange.state import State
from sizewise.fleet.devices import Fleet, GroupConfig
from sizewise.runs import benefit, catalogue, preparation, session
from sizewise.runs.benefit import Benefit, Served, Validation, figures, models_of
from sizewise.steps import metrics
from sizewise.steps.label_sets import divide
from sizewise.steps.metrics import count
from sizewise.training.evaluation import Score
from text_cases import ARGS, text_dataset

TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "cnn", "args": {"layers": [6, 8, 8]}},
    "data": {"train_limit": 120, "test_limit": 40, "validation": 0.25, "partition": "dirichlet"},
    "fleet": {"devices": 6, "per_round": 4, "ratios": [0.5, 1.0]},
    "recipe": {"batch": 8, "eval_batch": 16},
}


# ---- by hand


class Answers:
    """Stands for an engine: knows which training samples each size gets right."""

    validates = True

    def __init__(self, right: Mapping[str, set[int]]) -> None:
        self.right, self.asked = right, dict[str, list[int]]()

    def validate(self, state: State, rows: Mapping[str, Tensor]) -> dict[str, Score]:
        self.asked = {size: own.tolist() for size, own in rows.items()}
        hits = {s: tuple(int(row in self.right[s]) for row in own) for s, own in self.asked.items()}
        return {
            size: Score((sum(own), len(own)), 0.0, len(own), own, (1,) * len(own))
            for size, own in hits.items()
        }


def test_three_devices_of_two_classes() -> None:
    config = configs.from_dict(
        {
            **TABLES,
            "model": {"name": "mlp", "args": {"hidden": [8]}},
            "fleet": {"per_round": 3, "group": [{"count": 2, "ratio": 0.5}, {"count": 1}]},
            "method": {"name": "heterofl", "widths": [0.5, 1.0]},
            "recipe": {},
        }
    )
    setting = preparation.prepare(config)
    # Devices hold samples 0..4, 5..9 and 10..14, and validate on the last 2, 4 and 1 of them.
    order, offsets = torch.arange(15), torch.tensor([0, 5, 10, 15])
    partition = Partition(order, offsets, torch.tensor([2, 4, 1]))
    engine = Answers({"width 0.5": {3, 4, 7}, "full": set()})
    validation = Validation(setting.fleet, partition)
    state = setting.method.setup()
    found = validation.measured(setting.method, engine, state, 0)  # type: ignore[arg-type]
    assert engine.asked == {"width 0.5": [3, 4, 6, 7, 8, 9], "full": [14]}
    assert found == Benefit(
        3 / 7,
        (
            Served(0, "0.5 model", "width 0.5", 2, 1.0),
            Served(1, "0.5 model", "width 0.5", 4, 0.25),
            Served(2, "any", "full", 1, 0.0),
        ),
    )
    summary = found.summary()
    assert summary["score"] == 3 / 7
    assert (summary["devices"], summary["mean"]) == (3, pytest.approx(1.25 / 3))
    assert summary["worst_tenth"] == 0.0
    assert summary["deviation"] == pytest.approx(0.4249183)
    assert summary["classes"] == {
        "0.5 model": {"devices": 2, "mean": 0.625, "worst_tenth": 0.25, "deviation": 0.375},
        "any": {"devices": 1, "mean": 0.0, "worst_tenth": 0.0, "deviation": 0.0},
    }


@pytest.mark.parametrize(("count", "worst"), [(1, 0.0), (10, 0.0), (11, 0.05), (20, 0.05)])
def test_the_worst_tenth_is_rounded_up(count: int, worst: float) -> None:
    accuracies = [number / 10 for number in reversed(range(count))]
    assert figures(accuracies)["worst_tenth"] == pytest.approx(worst)


def test_scores_have_no_accuracy() -> None:
    assert Benefit(0.8, ()).summary() == {"score": 0.8}


def test_of_a_million_devices_some_are_looked_at() -> None:
    fleet = Fleet((GroupConfig(700_000, 5), GroupConfig(300_000, 9)), 5, (0, 0))
    validation = Validation(fleet, Draw(100, 1_000_000, 10, seed=0, share=0.2))
    numbers = list(validation.rows)
    assert len(numbers) == benefit.MOST
    assert (numbers[:2], numbers[-1]) == ([0, 100], 999_900)
    assert sum(number < 700_000 for number in numbers) == 7_000


# ---- against the obvious way

OPTIONS: dict[str, dict[str, Any]] = {
    "fedgkt": {"client": "cnn", "client_args": {"layers": [6, 8]}, "server_epochs": 1},
    "local": {"sizes": "width"},
    "heterofl": {"assign": "ratio"},
    "fjord": {"assign": "ratio"},
    "splitmix": {"atom": 0.25, "assign": "ratio"},
}
RATIOS = {"depthfl": [1.2, 2.0], "m-fedepth": [1.0, 4.0], "fedin": [2.0], "fedgkt": [2.0]}
# What devices of the two classes run; where nothing is said, the one model that there is.
RUN = {
    "nefl": {"0.5 model": "submodel 1 (0.17)", "1 model": "submodel 2 (0.83)"},
    "heterofl": {"0.5 model": "width 0.5", "1 model": "full"},
    "fjord": {"0.5 model": "width 0.5", "1 model": "full"},
    "splitmix": {"0.5 model": "2 of width 0.25", "1 model": "4 of width 0.25"},
}


def config_of(name: str) -> configs.Config:
    fleet = {**TABLES["fleet"], "ratios": RATIOS.get(name, [0.5, 1.0])}
    method = {"name": name, **OPTIONS.get(name, {})}
    return configs.from_dict({**TABLES, "fleet": fleet, "method": method})


@torch.no_grad()
def slowly(runner: DeviceRunner, state: State, size: str, device: int) -> float:
    """Return a device's accuracy, one sample after the other."""
    rows, data = runner.partition.validation(device).tolist(), runner.dataset
    module = runner.method.deploy(state)[size].fill().eval()
    guesses = [module(data.transform()(data.train_inputs[[row]], None)).argmax(-1) for row in rows]
    pairs = zip(guesses, data.train_labels[rows], strict=True)
    return sum(int(guess) == int(label) for guess, label in pairs) / len(rows)


@pytest.mark.parametrize("name", catalogue.names("methods"))
def test_as_a_loop_over_devices_gives(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    if config.recipe.norm == "batch":  # What a sample gives must not depend on its batch.
        config = replace(config, recipe=replace(config.recipe, norm="tracked"))
    with session.started(config, tmp_path / "run") as federation:
        federation.run()
        engine = federation.engine
        assert isinstance(engine, LocalEngine)
        state, totals = federation.folder.restore() or pytest.fail("nothing is saved")
        served = json.loads((tmp_path / "run/devices.json").read_text())
        assert served
        for one in served:
            found = slowly(engine.runner, state, one["size"], one["device"])
            assert one["accuracy"] == pytest.approx(found), one
            if name in RUN:
                assert one["size"] == RUN[name][one["group"]]
        assert totals.validation["devices"] == len(served)


def names_of(tables: Mapping[str, Any], round_index: int = 0) -> list[str]:
    """Return what the models of a fleet's devices are called before the first round."""
    setting = preparation.prepare(configs.from_dict({**TABLES, **tables}))
    fleet = setting.fleet
    devices = [fleet.device(number, round_index) for number in range(fleet.present(round_index))]
    return list(models_of(setting.method, setting.start, devices, round_index).values())


def test_who_lacks_the_bytes_to_train_runs_what_the_weakest_does_who_can() -> None:
    groups = [{"count": 1, "memory": 99}, {"count": 1}, {"count": 2, "ratio": 0.5}]
    tables = {"fleet": {"per_round": 2, "group": groups}, "method": {"name": "heterofl"}}
    names = names_of(tables)
    assert names[0] == names[2] == names[3] == "width 0.5"
    assert names[1] == "full"


def test_where_nobody_can_train_it_is_the_main_model() -> None:
    tables = {"fleet": {"budgets": [99], "devices": 2, "per_round": 1}}
    assert names_of(tables) == ["full", "full"]


def test_who_joins_is_served_from_then_on(tmp_path: Path) -> None:
    event = {"round": 2, "join": 3, "memory": "3MB"}
    fleet = {"devices": 4, "per_round": 2, "event": [event]}
    config = configs.from_dict({**TABLES, "fleet": fleet})
    with session.started(config, tmp_path / "run") as federation:
        federation.run()
    lines = [json.loads(x) for x in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [line["validation"]["devices"] for line in lines] == [4, 7]
    assert list(lines[1]["validation"]["classes"]) == ["any", "3MB"]


def test_batch_norms_are_not_calibrated_on_what_is_held_out() -> None:
    setting = preparation.prepare(configs.from_dict(TABLES))
    data, held_out = setting.dataset, setting.partition.held_out()
    batches = list(training_batches(data, 16, held_out))
    trained = [row for row in range(120) if row not in held_out.tolist()]
    expected = data.transform()(data.train_inputs[trained], None)
    assert torch.equal(torch.cat(batches), expected)
    assert len(held_out) == 120 - len(trained) > 20


TEXTS = {
    "tags": text_dataset("tags"),
    "score": text_dataset("score"),
    "silos": join([replace(text_dataset("tags"), name=name) for name in ("here", "there")]),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts(kind: str, tmp_path: Path) -> None:
    """Tags are right or wrong one by one; scores are neither, and have the metric of all alone."""
    data = TEXTS[kind]
    tables = {
        "rounds": 1,
        "model": {"name": "encoder", "args": ARGS},
        "data": {"validation": 0.25, "partition": "iid"},
        "fleet": {"devices": 3, "per_round": 3},
        "recipe": {"batch": 4, "eval_batch": 6, "lr": 0.05},
    }
    with session.started(configs.from_dict(tables), tmp_path / "run", data) as federation:
        result = federation.run()
        state, _ = federation.folder.restore() or pytest.fail("nothing is saved")
        partition = federation.validation.partition  # type: ignore[union-attr]
        module = federation.method.deploy(state)["full"].fill().eval()
    with torch.no_grad():
        outputs = module(data.train_inputs)

    def value(rows: Tensor, metric: str) -> float:
        sets = divide(outputs[rows], data.train_labels[rows], data.sets)
        counts = [count(metric, *own, data.names(n)) for n, own in enumerate(sets)]
        if metric == "accuracy":
            return metrics.value(metric, [sum(part) for part in zip(*counts, strict=True)])
        return fmean(metrics.value(metric, own) for own in counts)

    found = result["validation"]
    assert found["score"] == pytest.approx(value(partition.held_out(), data.metric), abs=1e-6)
    served = json.loads((tmp_path / "run/devices.json").read_text())
    if kind == "score":
        assert (list(found), served) == (["score"], [])
        return
    for one in served:
        expected = value(partition.validation(one["device"]), "accuracy")
        assert one["accuracy"] == pytest.approx(expected)
    assert len(served) == 3


def test_images_to_validate_on_are_not_augmented() -> None:
    tables = {**TABLES, "recipe": {"augment": "crop-flip", "augment_once": True}}
    plain = preparation.prepare(configs.from_dict(TABLES))
    once = preparation.prepare(configs.from_dict(tables))
    same = (plain.dataset.train_inputs == once.dataset.train_inputs).flatten(1).all(1)
    held_out = once.partition.held_out()
    assert torch.equal(held_out, plain.partition.held_out())
    assert same[held_out].all()
    assert same.sum() < len(held_out) + 20
