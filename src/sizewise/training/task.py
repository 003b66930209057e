"""What is fixed for a whole run and the same on the server, in every worker and on every device."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sizewise import models
from sizewise.common import rng
from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept, trace
from sizewise.data import pretrained
from sizewise.data.catalog import MEMORY
from sizewise.data.dataset import Target
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import TrainingStage, Update
from sizewise.steps.recipe import Recipe
from sizewise.surgery import norms
from sizewise.surgery.anatomy import Anatomy, hidden_shapes
from sizewise.surgery.in_place import InPlace
from sizewise.surgery.taking_apart import taken_apart
from sizewise.torch_tools import placement
from sizewise.torch_tools.layout import Arrangement, Layout, arranged
from sizewise.training.low_memory_inference import LowMemoryInference


@dataclass(frozen=True)
class ModelConfig:
    """The `[model]` table.

    Attributes:
        name: A model of the zoo; "package.module:factory" for your own; "timm:NAME",
            "torchvision.models:NAME" or "transformers:CLASS" for those of other libraries.
        args: Further arguments of its factory.
        anatomy: Paths of its `blocks`, if those that are found are wrong; or of `stem`, `blocks`
            and `head`. For methods that take a model apart.
        weights: What to start from: a safetensors file with a state dict, or a folder, package or
            hub name with one. Of a model that came built from Python: "memory:" and their hash,
            which the run sets.
        hollow: Build it without weights, to plan for a model that this machine could not hold; it
            cannot be trained.
        sha256: Of a model that was given from Python: a hash of its structure. The run sets it.
    """

    name: str = "preresnet20"
    args: Mapping[str, Any] = field(default_factory=dict)
    anatomy: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    hollow: bool = False
    sha256: str | None = None

    @property
    def came_built(self) -> bool:
        """Whether a run starts from the weights that the model had when it was given."""
        return self.weights is not None and self.weights.startswith(MEMORY)


@dataclass(frozen=True)
class Task:
    """The model, the recipe and the shape of the data.

    Attributes:
        model: Which model to build.
        recipe: How to train it.
        input_shape: Shape of one image, (channels, height, width), or of one text, (tokens,).
        classes: Number of classes, tags or tokens; 1 for scores.
        seed: The run's seed.
        rounds: Length of the run.
        budgets: The different budgets of the fleet, smallest first; None, unlimited, is last.
        ratios: The different shares of the model that the fleet's bytes stand for, ascending.
        devices: Size of the fleet.
        enforce: Meter every training step, not only the first ones of each kind of work.
        vocabulary: How many token ids there are; 0: the samples are images.
        target: What the model has to find: a class, a tag for each token, a score, or the token
            after each.
        metric: How models are measured; see `metrics`.
        silos: Names of the silos, where each has labels and a head of its own; see `label_sets`.
        models: Names of models that groups of devices have of their own.
        device: Where models train and are evaluated; see `torch_tools.placement`.
        layout: How images should lie in memory; see `torch_tools.layout`.
        predicted_for: Whose kernels predicted bytes are about. Budgets are of devices with a CPU.
        sketched: Build models without weights, to plan only; what has to run, to see what it
            consists of, still gets them.
    """

    model: ModelConfig
    recipe: Recipe
    input_shape: tuple[int, ...]
    classes: int
    seed: int = 0
    rounds: int = 1
    budgets: tuple[int | None, ...] = (None,)
    ratios: tuple[float, ...] = ()
    devices: int = 1
    enforce: bool = False
    vocabulary: int = 0
    target: Target = "class"
    metric: str = "accuracy"
    silos: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    device: str = "cpu"
    layout: Layout = "contiguous"
    predicted_for: str = "cpu"
    sketched: bool = False

    @property
    def hollow(self) -> bool:
        """Whether models are built without weights."""
        return self.model.hollow or self.sketched

    @property
    def every_token(self) -> bool:
        """Whether every token of a text has a target of its own."""
        return self.target in ("tags", "next")

    def inputs(self, batch: int) -> Tensor:
        """Return a batch (B, C, H, W), or of token ids (B, T), of which only the shape matters."""
        kind = torch.int64 if self.vocabulary else torch.float32
        return torch.empty((batch, *self.input_shape), dtype=kind, device="meta")

    def targets(self, batch: int) -> Tensor:
        """Return labels for a batch, (B,) or for tokens (B, T), of which only the shape matters."""
        shape = (batch, *self.input_shape) if self.every_token else (batch,)
        kind = torch.float32 if self.target == "score" else torch.int64
        return torch.empty(shape, dtype=kind, device="meta")

    def drawn(self, batch: int) -> Tensor:
        """Return a batch of noise, the same every time, to run a model on."""
        generator = rng.torch_generator(self.seed, "anatomy")
        # Not zeros, of which a network without biases makes nothing but zeros.
        if self.vocabulary:
            return torch.randint(self.vocabulary, (batch, *self.input_shape), generator=generator)
        return torch.randn(batch, *self.input_shape, generator=generator)

    def stage(self, round_index: int = 0) -> TrainingStage:
        """Return the one stage of a device that trains everything at once."""
        return TrainingStage(self.recipe.lr_at(round_index, self.rounds), self.recipe.epochs)

    def weight(self, update: Update) -> float:
        """Return how much an update counts; its device says itself how many samples it has."""
        by_samples = self.recipe.weighting == "samples" and self.recipe.merge == "mean"
        return float(update.samples) if by_samples else 1.0

    def classes_only(self, method: str) -> None:
        """Raise ConfigError unless every sample has one class."""
        if self.target != "class" or self.silos:
            raise ConfigError(
                f"{method} needs samples with one class each, of one set of classes; this data has "
                f"{'silos' if self.silos else self.target}, so use another method"
            )

    def mean_only(self, method: str) -> None:
        """Raise ConfigError if a robust rule is asked for by a method that merges no weights."""
        if self.recipe.merge != "mean":
            raise ConfigError(
                f"recipe.merge = {self.recipe.merge!r} has nothing to act on: {method} merges no "
                f"weights of devices; leave it out, or use another method"
            )

    def has_classes(self, option: str) -> None:
        """Raise ConfigError if samples have scores, to which an option for classes says nothing."""
        if self.target == "score":
            raise ConfigError(
                f"{option} is about classes, and this data has scores, which have none; leave it "
                f"out, or use data with classes or tags"
            )

    def named(self, name: str, args: Mapping[str, Any] | None = None) -> "Task":
        """Return the task with another model.

        Args:
            name: That model.
            args: Further arguments of its factory; default: those of this task's model.
        """
        given = self.model.args if args is None else args
        return replace(
            self, model=replace(self.model, name=name, args=given, weights=None, sha256=None)
        )

    def build(self, width: float = 1.0, draw: int = 0) -> nn.Module:
        """Build the model at a width ratio, with fresh weights that depend on the seed alone.

        A model whose factory takes no width is cut, and its layers are initialised again. One that
        came built keeps its weights at full width, unless another draw is asked for.

        Args:
            width: Ratio of channels to keep.
            draw: Which of several independent initialisations.
        """
        kept = self.kept(width)
        place = torch.device("meta") if self.hollow else nullcontext()
        with rng.seeded(self.seed, "model", str(width), *([draw] if draw else [])), place:
            module = models.build(
                self.model.name,
                classes=self.classes,
                image=self.input_shape,
                vocabulary=self.vocabulary,
                tags=self.every_token,
                sets=max(1, len(self.silos)),
                weights=self.model.weights,
                width=width if kept is None else 1.0,
                args=self.model.args,
                check=width not in self._checked and not self.hollow,
            )
            self._checked.add(width)
            norms.prepare(module, self.recipe.norm)
            if kept is not None:
                module = shrinking.shrink(module, self.channels, kept)
            if kept is not None or (draw and self.model.came_built):
                for layer in module.modules():
                    if callable(reset := getattr(layer, "reset_parameters", None)):
                        reset()
            return module

    def build_to_run(self) -> nn.Module:
        """Build the full model with weights, also where others are sketched."""
        return replace(self, sketched=False).build()

    @cached_property
    def arrangement(self) -> Arrangement:
        """How images lie in memory; raise ConfigError if the model is wrong in that layout."""
        if self.layout == "contiguous":
            return Arrangement()
        return arranged(self.build_to_run(), self.drawn(4), self.layout)

    @cached_property
    def channels(self) -> Channels:
        """What hangs together in the model: traced once, for all who cut it."""
        return trace(self.build(), self.inputs(2))

    def kept(self, width: float) -> Kept | None:
        """Return the channels that `build` keeps at a width; None if it does not cut the model."""
        if width == 1 or models.takes_width(self.model.name):
            return None
        return selection.keep(self.channels, width, rounding="floor_min1")

    def head(self, draw: int) -> nn.Module:
        """Return the head of the model in one of its initialisations, to be copied.

        A whole model is built for it and thrown away; submodels with the same exits all ask for it.
        """
        if draw not in self._heads:
            model = self.build(draw=draw)
            found = (model.get_submodule(path) for path in self.parts.head)
            self._heads[draw] = nn.Sequential(*found)
        return self._heads[draw]

    @cached_property
    def _heads(self) -> dict[int, nn.Module]:
        """Heads that were drawn: a cache, never a result."""
        return {}

    @cached_property
    def _checked(self) -> set[float]:
        """Widths at which the model has been seen to work: a cache, never a result."""
        return set()

    def pretrained(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the weights that a model starts from instead of fresh ones, by name.

        Args:
            module: The full model, or a narrower one with the same names, which then gets the first
                channels of each group; default: the full one.
        """
        if self.model.weights is None or self.hollow:
            return {}
        full = self.build()
        if self.model.came_built:
            given = dict(full.state_dict())
        else:
            loaded = pretrained.load(self.model.weights)
            given = pretrained.fitting(loaded, full, self.model.weights)
        own = {} if module is None else module.state_dict()
        if all(own[name].shape == tensor.shape for name, tensor in given.items() if name in own):
            return given
        places = shrinking.view(self.channels, selection.keep_like(self.channels, own))
        return {name: places[name].read(given) for name in given}

    def norm(self, channels: int) -> nn.Module:
        """Return a batch norm that follows the recipe's policy."""
        return norms.prepare(nn.BatchNorm2d(channels), self.recipe.norm)

    def anatomy(self, module: nn.Module) -> Anatomy:
        """Return where a model of this task can be taken apart."""
        if unknown := set(self.model.anatomy) - {"stem", "blocks", "head"}:
            raise ConfigError(
                f"model.anatomy names stem, blocks and head, not {sorted(unknown)[0]!r}"
            )
        return taken_apart(module, self.drawn(2), **self.model.anatomy)

    @property
    def parts(self) -> Anatomy:
        """Stem, blocks and head of the model, for methods that take it apart."""
        if isinstance(self._parts, ModelError):
            raise self._parts
        return self._parts

    @property
    def is_taken_apart(self) -> bool:
        """Whether somebody has asked for the parts, and there are some."""
        return "_parts" in vars(self) and not isinstance(self._parts, ModelError)

    @cached_property
    def _parts(self) -> Anatomy | ModelError:
        """The parts, or why there are none; looked for once."""
        if self.model.hollow:
            return ModelError(
                "a model without weights cannot be run, to see what it consists of; leave out "
                "model.hollow, or use a method with adapters"
            )
        try:
            return self.anatomy(self.build_to_run())
        except ModelError as error:
            return error

    @cached_property
    def hidden_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a sample's hidden tensor after the stem and after each block."""
        if isinstance(self.parts, InPlace):
            return self.parts.shapes
        return hidden_shapes(self.build_to_run().eval(), self.parts, self.drawn(2))

    @cached_property
    def first_names(self) -> dict[str, str]:
        """For each name of a tensor in the full model, the first of those that it is tied under."""
        tensors = self.build().state_dict(keep_vars=True)
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}

    def low_memory_inference(self, module: nn.Module) -> nn.Module:
        """Return a model that is evaluated within `recipe.eval_memory`."""
        # The last batch can be half as large again; see `evaluation.batch_count`.
        largest = self.recipe.eval_batch + self.recipe.eval_batch // 2
        budget = self.recipe.eval_memory or sys.maxsize
        module = placement.placed(module, placement.HOST)  # Its budget is of host memory.
        parts = self.anatomy(module).in_turn("recipe.eval_memory")
        return LowMemoryInference(module, parts, self.inputs(largest), budget)
