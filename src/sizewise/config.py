"""The config: a TOML file, `--set` overrides, and frozen dataclasses that say what they may hold.

Unknown keys are errors that name the nearest known one. The complete config, with every default
filled in, is written into the run folder; reading that file gives the same run again.
"""

import math
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sizewise import methods
from sizewise.common.structure import Bytes, build, plain
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError
from sizewise.families.base import Method
from sizewise.fleet.devices import Fleet, FleetConfig
from sizewise.fleet.round_policy import RoundPolicy
from sizewise.privacy.config import PrivacyConfig
from sizewise.steps import precision
from sizewise.steps.recipe import Recipe
from sizewise.torch_tools import placement
from sizewise.torch_tools.layout import Layout
from sizewise.training.task import ModelConfig, Task


@dataclass(frozen=True)
class EngineConfig:
    """The `[engine]` table.

    Attributes:
        workers: Processes that train devices, one thread each; 1 trains in this process.
        enforce: Hold every training step to its device's budget. Otherwise only the first steps of
            each kind of work are metered, which is enough unless a model's appetite depends on
            its data; costs 7 to 18 % of the speed.
        save_every: Make a checkpoint after every so many rounds, and after the last. A crash loses
            at most one round more. Writing a large model can take longer than training it.
        together: Most devices that train in one batched call, where plans are alike; 0: each alone.
            Faster for tiny models only; the last bits of results differ.
        device: Where devices train and models are evaluated: "cpu", "auto" (the accelerator of the
            machine, if it has one), or one such as "cuda", "cuda:1", "mps" or "xpu"; see
            docs/accelerators.md.
        device_memory: Bytes of each accelerator that devices in training may take together; as many
            of the `workers` are at work at once as fit. Default: what is free at the start.
        layout: How images lie in memory: "channels_last" makes most convolutions faster on CPUs and
            GPUs, and changes the last bits of results; "auto" is that for models without very wide
            convolutions, for which it is not faster.
        flower: Whom a server waits for when devices are machines of their own.
    """

    workers: int = 1
    enforce: bool = False
    save_every: int = 1
    together: int = 0
    device: str = "cpu"
    device_memory: Bytes | None = None
    layout: Layout = "contiguous"
    flower: RoundPolicy = field(default_factory=RoundPolicy)

    def __post_init__(self) -> None:
        for name in ("workers", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if self.together < 0:
            raise ConfigError(f"engine.together must not be negative, as {self.together} is")


@dataclass(frozen=True)
class StopConfig:
    """The `[stop]` table: when a run ends before its last round.

    Attributes:
        patience: End after so many evaluations in a row whose validation score is not better than
            the best before; needs `data.validation`. Default: never.
        min_delta: By how much a score must be higher to be better.
    """

    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ConfigError(
                f"stop.patience must be at least 1, not {self.patience}; leave it out for never"
            )
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"stop.min_delta must not be negative, not {self.min_delta}")


@dataclass(frozen=True)
class MethodConfig:
    """The `[method]` table: a name, and the method's own options beside it.

    Attributes:
        name: See `sizewise list methods`; or "package.module:Class" for your own.
        options: What the method's own `Options` take.
    """

    name: str = "fedavg"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        seed: All random choices follow from it.
        rounds: How many.
        model: What is trained.
        data: On which samples, and who holds them.
        fleet: By whom.
        method: How the work is divided and put together.
        recipe: How devices train, and what the server does with it.
        engine: How this is carried out.
        stop: When it ends early.
        privacy: What of a device the model may tell; default: all that it does.
    """

    seed: int = 0
    rounds: int = 20
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    recipe: Recipe = field(default_factory=Recipe)
    engine: EngineConfig = field(default_factory=EngineConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    privacy: PrivacyConfig | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, not {self.rounds}")
        if self.stop.patience is not None and not self.data.validation:
            raise ConfigError(
                "stop.patience goes by the validation score, and no device validates; "
                "set data.validation to a share such as 0.2"
            )
        if self.privacy is not None:
            _check_private(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the nested tables of its TOML file."""
        tables: dict[str, Any] = plain(self)
        tables["method"] = {"name": self.method.name, **plain(self.method.options)}
        return tables


def _check_private(config: Config) -> None:
    """Raise ConfigError if something tells of devices what no noise covers."""
    if config.recipe.weighting != "equal":
        reason = "how many samples a device has is private; set recipe.weighting = 'equal'"
    elif config.fleet.sampling != "poisson":
        reason = "each device must be drawn by itself; set fleet.sampling = 'poisson'"
    elif config.data.validation:
        reason = "scores on devices' own samples, by which the best round is found, get no noise; "
        reason += "leave out data.validation"
    elif config.recipe.norm == "sbn":
        reason = "recipe.norm = 'sbn' takes statistics from all devices' samples; use 'batch'"
    elif config.recipe.merge != "mean":
        reason = f"recipe.merge = {config.recipe.merge!r} has no bound on what one device changes "
        reason += "that noise could be made for; use 'mean'"
    elif config.fleet.attack:
        reason = "devices of fleet.attack do as they like; leave one of both out"
    elif config.engine.flower.enough is not None:
        reason = "who is early enough depends on the others; leave out engine.flower.enough"
    else:
        return
    raise ConfigError(f"[privacy] cannot hold: {reason}")


def from_dict(tables: Mapping[str, Any]) -> Config:
    """Return the config made of nested tables, the method's defaults filled in."""
    tables = dict(tables)
    chosen = dict(_table(tables, "method"))
    name = chosen.pop("name", MethodConfig.name)
    if not isinstance(name, str):
        raise ConfigError(f"method.name must be text in quotes, not {name!r}")
    method = methods.find(name)
    options = build(method.Options, chosen, "method")
    tables["recipe"] = {**method.recipe_defaults, **_table(tables, "recipe")}
    if tables.get("privacy") is not None:
        tables["recipe"] = {"weighting": "equal", **tables["recipe"]}
        tables["fleet"] = {"sampling": "poisson", **_table(tables, "fleet")}
    tables.pop("method", None)
    return replace(build(Config, tables), method=MethodConfig(name, plain(options)))


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} must be a table, not {table!r}")
    return table


def make_task(
    config: Config, dataset: Dataset, fleet: Fleet | None = None, *, sketched: bool = False
) -> Task:
    """Return what every process of a run knows; before there is a fleet, of unlimited devices."""
    device = placement.find(config.engine.device)
    precision.check(config.recipe.precision, device)
    return Task(
        model=config.model,
        recipe=config.recipe,
        input_shape=dataset.shape,
        classes=dataset.classes,
        seed=config.seed,
        rounds=config.rounds,
        budgets=fleet.budgets() if fleet else (None,),
        ratios=fleet.ratios() if fleet else (),
        devices=fleet.total if fleet else 1,
        enforce=config.engine.enforce,
        vocabulary=dataset.vocabulary,
        target=dataset.target,
        metric=dataset.metric,
        silos=dataset.silos,
        device=str(device),
        layout=config.engine.layout,
        models=tuple(dict.fromkeys(g.model for g in config.fleet.group if g.model is not None)),
        sketched=sketched,
    )


def make_method(config: Config, task: Task) -> Method:
    """Return the config's method, ready for a task."""
    method = methods.find(config.method.name)
    if task.models and not method.own_models:
        raise ConfigError(
            f"fleet.group.model names {task.models[0]!r}, but {config.method.name} trains one "
            f"model on all devices; leave it out, or use a method such as fedin"
        )
    made = method(task, build(method.Options, config.method.options, "method"))
    if config.privacy is not None and (reason := made.unclipped()) is not None:
        raise ConfigError(f"[privacy] cannot hold with {config.method.name}: {reason}")
    if config.recipe.sample_clip is not None and (reason := made.unhidden()) is not None:
        raise ConfigError(f"recipe.sample_clip cannot hold with {config.method.name}: {reason}")
    return made


STDIN = Path("-")
"""The name of a config file that stands for what comes in on stdin."""


def load(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the config of a file, or the embedded default, with `a.b=value` overrides applied."""
    return from_dict(read(path, overrides))


def read(path: Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a config file, or the embedded default, as nested tables, and apply overrides.

    Args:
        path: A TOML file; None is the default config, "-" is stdin.
        overrides: Assignments whose values are TOML; what is not TOML is taken as text.
    """
    source = path if path is not None else Path(__file__).with_name("default.toml")
    try:
        text = source.read_bytes() if source != STDIN else sys.stdin.buffer.read()
        tables = tomllib.loads(text.decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {str(source)!r}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(source)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(source)!r} is not valid TOML: {error}") from None
    return assigned(tables, overrides)


def assigned(tables: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return nested tables with `a.b=value` overrides applied, in place."""
    for override in overrides:
        _assign(tables, override)
    return tables


def _assign(tables: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value` in place."""
    path, separator, text = override.partition("=")
    if not separator or not path.rpartition(".")[2].strip():
        raise ConfigError(f"--set takes key=value, such as recipe.lr=0.05, not {override!r}")
    put(tables, path, parsed(text), f"--set {override!r}")


def parsed(text: str) -> Any:
    """Return the value of an override: TOML, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def put(tables: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set the value at a dotted path of nested tables, in place.

    Raises:
        ConfigError: Something on the way is no table; the sentence begins with `where`.
    """
    *parents, key = [part.strip() for part in path.split(".")]
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {parent!r} is not a table")
    # The ways to give budgets exclude each other: an override replaces what the file chose, and
    # the profiles that went with it.
    if parents == ["fleet"] and key in _BUDGET_KEYS:
        for other in (*_BUDGET_KEYS, "profiles"):
            table.pop(other, None)
    table[key] = value


_BUDGET_KEYS = ("budgets", "ratios", "scenario", "group")
