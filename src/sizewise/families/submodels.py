"""Submodels of one model: how they are built, where their tensors live, and copies to work on.

A family of methods derives its own and overrides `build` and `slices`; all caches are here. The
same object exists on the server and in every worker, so it holds nothing about a run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.common.widths import named
from sizewise.cutting.channels import Channels, Kept
from sizewise.exchange.kept_apart import shared_name
from sizewise.exchange.plan import Plan, Submodel
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, cut, whole
from sizewise.surgery import norms
from sizewise.torch_tools.layout import laid_out
from sizewise.torch_tools.remaking import clone, remade
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task
from sizewise.training.working import WorkingCopy

CACHED_VIEWS = 64
"""Submodels that roll or are drawn come and go: more views than these are not kept."""


@dataclass(frozen=True)
class Width(Submodel):
    """A model with fewer channels.

    Attributes:
        width: The ratio of channels that it keeps.
    """

    width: float = 1.0

    @property
    def label(self) -> str:
        """What people call it."""
        return "full" if self.width == 1 else f"width {named(self.width)}"


class Submodels:
    """The submodels of a task's model; here, the model as its factory builds it at some width."""

    def __init__(self, task: Task) -> None:
        self.task = task
        # Working copies and figures that depend on shapes only: caches, never results.
        self._copies: dict[Submodel, WorkingCopy] = {}
        self._patterns: dict[Submodel, nn.Module] = {}
        self._views: dict[Submodel, View] = {}

    # ---- what a family says

    def build(self, submodel: Any) -> nn.Module:
        """Build a fresh model of a submodel's shapes."""
        return self.task.build(_width(submodel))

    def slices(self, submodel: Any) -> View:
        """Return where each tensor of a submodel lives; `view` remembers it."""
        return self.separate(whole(self.copy(submodel).tensors), submodel)

    def held(self, module: nn.Module) -> frozenset[str]:
        """Return the names of a model's tensors that every machine has: they are never sent."""
        return frozenset()

    def base_tensors(self) -> Tensors:
        """Return the tensors that every machine has, to be shared by its processes; see `hold`."""
        return {}

    def hold(self, tensors: Tensors) -> None:
        """Use these tensors, which another process has loaded, in place of others like them."""

    def working(self, module: nn.Module) -> WorkingCopy:
        """Return the working copy that a fresh model becomes."""
        return WorkingCopy(module, torch.device(self.task.device), self.held(module))

    def apart(self, module: nn.Module) -> set[str]:
        """Return the names of the tensors that the server keeps once for each submodel."""
        return norms.kept_apart(module, self.task.recipe.norm)

    def separate(self, found: View, submodel: Submodel) -> View:
        """Point what is kept apart at the copies that belong to this submodel."""
        apart = self.apart(self.module(submodel))
        return norms.separate(found, apart, submodel.label)

    def kept(self, submodel: Any) -> Kept | None:
        """Return the channels that a submodel keeps of each group; None if it is not cut."""
        return self.task.kept(_width(submodel))

    def traced(self, submodels: Iterable[Submodel]) -> Channels | None:
        """Return the channels that some of these are cut from; None if none is cut."""
        cut = any(self.kept(submodel) is not None for submodel in submodels)
        return self.task.channels if cut else None

    # ---- what everybody asks

    def view(self, submodel: Submodel) -> View:
        """Return which server tensors, and which entries of them, a submodel consists of."""
        if submodel not in self._views:
            if len(self._views) >= CACHED_VIEWS:
                self._views.clear()
            self._views[submodel] = self.slices(submodel)
        return self._views[submodel]

    def copy(self, submodel: Submodel) -> WorkingCopy:
        """Return this process's working copy for submodels of these shapes."""
        key = submodel.shape_key
        if key not in self._copies:
            self._copies[key] = self.working(self.another(key))
        return self._copies[key]

    def another(self, submodel: Submodel) -> nn.Module:
        """Return a fresh model of a submodel's shapes: a copy, if one was built to look at."""
        pattern = self._patterns.get(submodel.shape_key)
        return self._built(submodel.shape_key) if pattern is None else self.twin(pattern)

    def twin(self, module: nn.Module) -> nn.Module:
        """Return a copy of a model, with tensors of its own but for those that are held."""
        held, own = self.held(module), own_tensors(module)
        shared = {id(tensor) for name, tensor in own.items() if name in held}
        return remade(module, lambda t: t.detach() if id(t) in shared else clone(t), clone)

    def pattern(self, submodel: Submodel) -> nn.Module:
        """Return a model of a submodel's shapes as it was built, to learn its cost from.

        Not the working copy: that may be frozen in parts, or hold activations.
        """
        key = submodel.shape_key
        if key not in self._patterns:
            self._patterns[key] = self._built(key)
        return self._patterns[key]

    def _built(self, submodel: Submodel) -> nn.Module:
        return laid_out(self.build(submodel), self.task.arrangement)

    def module(self, submodel: Submodel) -> nn.Module:
        """Return the working copy's model, to look at its structure."""
        return self.copy(submodel).module

    def forget(self) -> None:
        """Let go of all models that were built."""
        self._copies.clear()
        self._patterns.clear()

    def release(self, kept: Submodel | None = None) -> None:
        """Take working copies off the device, all but those of one submodel's shapes."""
        for key, copy in self._copies.items():
            if kept is None or key != kept.shape_key:
                copy.release()

    def filled(self, submodel: Submodel, state: State) -> nn.Module:
        """Return the working copy of a submodel with the server's tensors in it."""
        return self.copy(submodel).load(cut(state.tensors, self.view(submodel)))

    def trained_names(self, plan: Plan) -> frozenset[str]:
        """Return the local names of the server's tensors that a plan trains."""
        copy = self.copy(plan.submodel)
        names = copy.trained_names([copy.actual(stage) for stage in plan.stages])
        return frozenset(names).intersection(self.view(plan.submodel))

    # ---- the server's tensors

    def initial(self, submodel: Submodel) -> dict[str, Tensor]:
        """Return the server's tensors of a submodel, pre-trained if the task says so."""
        tensors, view, module = {}, self.view(submodel), self.build(submodel)
        given = self.task.pretrained(module)
        for local, tensor in own_tensors(module).items():
            name = view[local].name
            tensors[name] = given.get(shared_name(name), tensor).detach().clone()
        return tensors

    def extended(self, state: State, submodels: Iterable[Submodel]) -> State:
        """Return a state that also has the tensors which only these submodels have."""
        tensors = dict(state.tensors)
        for submodel in submodels:
            self.pattern(submodel)  # First: the working copy behind the view is copied from it.
            view = self.view(submodel)
            missing = {n: place for n, place in view.items() if place.name not in tensors}
            fresh = own_tensors(self.pattern(submodel)) if missing else {}
            for local, place in missing.items():
                tensors[place.name] = fresh[local].detach().clone()
        return replace(state, tensors=tensors)

    def parameters(self, state: State, main: Submodel) -> list[str]:
        """Return the names of the server tensors that are parameters, not statistics."""
        view = self.view(main)
        named = (name for name, _ in self.module(main).named_parameters())
        found = (view[name].name for name in named if name in view)
        # What is kept apart for each submodel is the same parameter in all of them.
        names = {shared_name(name) for name in found}
        return [name for name in state.tensors if shared_name(name) in names]


def _width(submodel: Submodel) -> float:
    """Return the ratio of channels of a submodel; where it says nothing of it, all."""
    width: float = getattr(submodel, "width", 1.0)
    return width
