import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from sizewise import methods
from sizewise.config import Config, MethodConfig, from_dict, load, make_method, make_task
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError
from sizewise.fleet.making import make_fleet
from sizewise.methods.fedavg import FedAvg

positive = st.floats(1e-6, 1e3)
memory = st.integers(1, 10**12)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of these keys."""
    return st.fixed_dictionaries({}, optional=fields)


recipes = some(
    optimizer=st.sampled_from(["sgd", "adam", "adamw", "amsgrad"]),
    lr=positive,
    epochs=st.integers(1, 9),
    max_steps=st.integers(1, 9),
    schedule=st.sampled_from(["constant", "cosine", "steps", "exponential"]),
    milestones=st.lists(positive, max_size=3),
    clip=positive,
    norm=st.sampled_from(["batch", "sbn", "tracked", "per_width_stats", "per_submodel"]),
    server=st.sampled_from(["fedavg", "fedavgm", "fedadam", "fedadamw", "fedyogi", "fedadagrad"]),
    augment_once=st.booleans(),
)
events = st.fixed_dictionaries({"round": st.integers(1, 9), "memory": memory, "join": st.just(2)})
groups = st.fixed_dictionaries(
    {"count": st.integers(5, 9)},
    optional={"memory": memory, "name": st.text(), "speed": positive, "ratio": positive},
)
fleets = st.one_of(
    some(devices=st.integers(5, 99), budgets=st.lists(memory, max_size=4)),
    some(devices=st.integers(5, 99), ratios=st.lists(positive, max_size=4)),
    some(scenario=st.sampled_from(["fair", "lack", "surplus"]), event=st.lists(events, max_size=2)),
    some(group=st.lists(groups, min_size=1, max_size=3), per_round=st.integers(1, 5)),
)
tables = some(
    seed=st.integers(0, 2**40),
    rounds=st.integers(1, 999),
    model=some(name=st.text(), args=st.dictionaries(st.text(), st.integers(0, 9))),
    data=some(partition=st.text(), alpha=positive, train_limit=st.integers(1, 99)),
    fleet=fleets,
    method=st.one_of(
        st.fixed_dictionaries({"name": st.sampled_from(methods.names())}),
        st.fixed_dictionaries({"name": st.just("fedavg"), "width": st.floats(0.1, 1)}),
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["heterofl", "fjord", "fedrolex", "feddropout"]),
                "widths": st.lists(st.floats(0.1, 1), max_size=3),
                "rounding": st.sampled_from(["ceil", "floor", "floor_min1"]),
                "assign": st.sampled_from(["bytes", "ratio"]),
            }
        ),
        st.fixed_dictionaries({"name": st.just("splitmix"), "atom": st.floats(0.1, 1)}),
    ),
    recipe=recipes,
    engine=some(workers=st.integers(1, 9)),
)


@given(tables)
def test_config_survives_its_own_file(chosen: dict[str, Any]) -> None:
    config = from_dict(chosen)
    assert from_dict(config.to_dict()) == config
    assert from_dict(tomllib.loads(tomli_w.dumps(config.to_dict()))) == config


def test_defaults_are_filled_in() -> None:
    filled = from_dict({}).to_dict()
    assert filled["method"] == {"name": "fedavg", "width": 1.0}
    assert filled["recipe"]["momentum"] == 0.9
    assert filled["fleet"]["per_round"] == 5
    assert "clip" not in filled["recipe"]  # TOML has no None


def test_method_brings_recipe_defaults_and_the_user_wins() -> None:
    assert from_dict({"method": {"name": "fedprox"}}).recipe.proximal == 0.01
    chosen = {"method": {"name": "fedprox"}, "recipe": {"proximal": 0.5}}
    assert from_dict(chosen).recipe.proximal == 0.5
    adam = from_dict({"method": {"name": "fedadam"}}).recipe
    assert (adam.server, adam.server_lr) == ("fedadam", 0.01)
    assert from_dict({}).recipe.proximal == 0


def test_no_file_is_the_embedded_default() -> None:
    config = load(None)
    assert (config.data.name, config.fleet.devices, config.rounds) == ("digits", 20, 20)
    assert config.fleet.budgets == (2_000_000, 3_000_000, 4_500_000, 7_000_000)
    assert len(config.fleet.profiles) == 4
    assert config.method.name == "fedepth"


def test_overrides_are_toml_or_text() -> None:
    overrides = ["recipe.lr=0.5", "data.partition = iid", "seed=7"]
    overrides += ["method.name=fedavg", "method.width=0.5"]
    config = load(None, [*overrides, "model.args.hidden=[3, 4]", "recipe.augment=flip"])
    assert config.recipe.lr == 0.5
    assert config.data.partition == "iid"
    assert config.method == MethodConfig("fedavg", {"width": 0.5})
    assert config.seed == 7
    assert config.model.args == {"hidden": [3, 4]}
    assert config.recipe.augment == "flip"


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("fleet.scenario=fair", "scenario", "fair"),
        ('fleet.budgets=["1kB"]', "budgets", (1000,)),
        ("fleet.ratios=[0.5, 1]", "ratios", (0.5, 1.0)),
        ("fleet.group=[{count=9}]", "budgets", ()),
    ],
)
def test_budgets_given_by_override_replace_those_of_the_file(
    override: str, field: str, value: object
) -> None:
    fleet = load(None, [override]).fleet
    assert getattr(fleet, field) == value
    assert sum(map(bool, (fleet.budgets, fleet.ratios, fleet.scenario, fleet.group))) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.lr", r"--set takes key=value, such as recipe\.lr=0\.05, not 'recipe\.lr'"),
        ("=3", r"--set takes key=value"),
        ("rounds.x=3", r"'rounds' is not a table"),
        ("recipe.epoch=3", r"unknown key 'recipe\.epoch'; did you mean 'epochs'\?"),
        ("recipes.lr=3", r"unknown key 'recipes'; did you mean 'recipe'\?"),
        ("recipe.lr=fast", r"recipe\.lr must be a number, not 'fast'"),
        ("recipe.norm=btach", r"recipe\.norm cannot be 'btach'; did you mean 'batch'\?"),
        ("recipe=3", r"recipe must be a table, not 3"),
        ("method=fedavg", r"method must be a table, not 'fedavg'"),
        ("method.name=3", r"method\.name must be text in quotes, not 3"),
        ("method.name=fedavgg", r"unknown method 'fedavgg'; did you mean 'fedavg'\?"),
        ("method.hedas='skip'", r"unknown key 'method\.hedas'; did you mean 'heads'\?"),
        ("method={name='fedavg', width=2}", r"method\.width must be in \(0, 1\], not 2\.0"),
        (
            "method={name='heterofl', widths=[0.5, 2]}",
            r"method\.widths must all be in \(0, 1\], not \[0\.5, 2\.0\]",
        ),
        (
            "method={name='heterofl', proportions=[0.5, 0.5]}",
            r"method\.proportions needs one number for each of the 0 method\.widths, not 2",
        ),
        (
            "method={name='heterofl', widths=[0.5, 1], proportions=[0, 1]}",
            r"method\.proportions must all be positive numbers, not \[0\.0, 1\.0\]",
        ),
        (
            "method={name='heterofl', widths=[0.5, 1], proportions=[1, 1]}",
            r"method\.proportions acts with method\.levels = 'dynamic' only; set that, or leave",
        ),
        (
            "method={name='m-fedepth', link='conv'}",
            r"method\.link = 'conv' leads to the model's head.* leave the link out",
        ),
        (
            "method={name='fedepth', data='buffered', optimizers='round'}",
            r"method\.optimizers = 'round' keeps momentum while buffers are filled",
        ),
        (
            "method={name='local', sizes='depth', width=0.5}",
            r"width acts with method\.sizes = 'one' only",
        ),
        ("method={name='local', exits=[1]}", r"exits acts with method\.sizes = 'depth' only"),
        ("method={name='feddropout', pool=3}", r"pool acts with method\.subsets = 'pool' only"),
        ("method={name='slt', patience=3}", r"acts with method\.rounds = 'early_stop' only"),
        ("method={name='depthfl', distil=false, ramp=9}", r"method\.distil = true only"),
        ("method={name='depthfl', feddyn=false, alpha=0.3}", r"method\.feddyn = true only"),
        (
            "method={name='fedin', rule='none', weight=2.0}",
            r"weight acts with a method\.rule other",
        ),
        ("recipe.server_weight_decay=0.1", r"acts with recipe\.server = 'fedadamw' only, not"),
        ("method={name='heterofl', slimmable=true}", r"method\.slimmable .*; name a few"),
        ("method={name='heterofl', scaler='nrom'}", r"method\.scaler cannot be 'nrom'; did you"),
        ("method={name='heterofl', levels='dynamo'}", r"method\.levels cannot be 'dynamo'"),
        ("method={name='fjord', draw='step'}", r"method\.draw cannot be 'step'"),
        ("method={name='fedrolex', stride=2}", r"method\.stride cannot be 2"),
        ("method={name='feddropout', pool=0}", r"method\.pool must be at least 1, not 0"),
        ("method={name='splitmix', atom=0}", r"method\.atom must be in \(0, 1\], not 0\.0"),
        ("method={name='small', width=1.5}", r"method\.width must be in \(0, 1\], not 1\.5"),
        ("method={name='exclusive', width=0.5}", r"unknown key 'method\.width'"),
        ("method={name='alllarge', width=0.5}", r"unknown key 'method\.width'"),
        ("rounds=0", r"rounds must be at least 1, not 0"),
        ("engine.workers=0", r"engine\.workers must be at least 1, not 0"),
        ("method.name=no_such_module:X", r"'no_such_module:X' cannot be imported"),
        ("method.name=math:Nothing", r"'math:Nothing' cannot be imported"),
        ("method.name=':X'", r"':X' cannot be imported"),
        ("method.name='.x:Y'", r"'\.x:Y' cannot be imported"),
        ("method.name=math:sqrt", r"'math:sqrt' holds no class derived from sizewise\.Method"),
    ],
)
def test_bad_override_is_one_clear_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(None, [override])
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no config file '.*c\.toml'; check the path"),
        (b"seed = ", r"is not valid TOML"),
        (b"\xff\xfe", r"cannot be read"),
    ],
)
def test_bad_file_is_one_clear_sentence(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_method_is_made_for_the_data(dataset: Dataset) -> None:
    chosen = {"model": {"name": "mlp"}, "method": {"width": 0.5}, "seed": 3, "rounds": 9}
    config = from_dict(chosen)
    method = make_method(config, make_task(config, dataset))
    assert isinstance(method, FedAvg)
    assert method.options == FedAvg.Options(width=0.5)
    task = method.task
    assert (task.input_shape, task.classes, task.seed, task.rounds) == ((1, 4, 4), 3, 3, 9)
    assert (task.budgets, task.ratios) == ((None,), ())


def test_task_knows_the_budgets_of_the_fleet(dataset: Dataset) -> None:
    config = from_dict({"fleet": {"devices": 6, "ratios": [1, 0.5, 0.5]}})
    fleet = make_fleet(config.fleet, lambda ratio: round(1000 * ratio))
    task = make_task(config, dataset, fleet)
    assert (task.budgets, task.ratios) == ((500, 1000), (0.5, 1.0))


def test_method_of_ones_own_is_found_by_module_and_class(dataset: Dataset) -> None:
    config = from_dict({"method": {"name": f"{__name__}:Mine", "taste": 3}})
    assert config.method.options == {"width": 1.0, "taste": 3}
    assert isinstance(make_method(config, make_task(config, dataset)), Mine)


class Mine(FedAvg):
    @dataclass(frozen=True)
    class Options(FedAvg.Options):
        taste: int = 1


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().seed = 3  # type: ignore[misc]
