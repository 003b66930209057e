"""A meter that can explain its peak: which bytes were alive at that moment, and what for."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sizewise.memory import flops, scratch
from sizewise.memory.meter import Meter, Trackable, tensors_of
from sizewise.torch_tools.hollow import follow, room_of
from sizewise.torch_tools.placement import HOST

PROCESS_BASE = 1_000_000
"""Bytes of a process besides tensors and kernels: autograd's nodes, Python objects."""


@dataclass(frozen=True)
class Footprint:
    """What is alive at the most expensive moment of a step, in bytes; the parts sum to the peak.

    Attributes:
        parameters: Parameters and buffers, and the received values a proximal step compares with.
        batch: Inputs and targets.
        gradients: Gradients that exist at that moment: few when the backward pass begins.
        optimizer_state: Momentum and the like, as they are from the second step on.
        activations: What the forward pass keeps for the backward pass.
        workspace: Temporaries.
        peak: The sum.
        process: An estimate of what a process needs on this CPU: tensors and the scratch space of
            the kernel at work when both together are most, compiled kernels, and `PROCESS_BASE`.
            MKL must give its buffers back for it: start the process with MKL_DISABLE_FAST_MM=1.
            None if it is not known (see `scratch`).
        not_known_for: What it is not known for: a kind of layer, or the CPU.
    """

    parameters: int
    batch: int
    gradients: int
    optimizer_state: int
    activations: int
    workspace: int
    peak: int
    process: int | None
    not_known_for: str | None = None

    def beside(self, resident: int) -> "Footprint":
        """Return the same beside so many bytes of parameters that only lie there."""
        return replace(
            self,
            parameters=self.parameters + resident,
            peak=self.peak + resident,
            process=None if self.process is None else self.process + resident,
        )


Transients = Mapping[int | None, int]
"""Bytes that an optimiser takes for a moment, by the number of what moves; None: all at once."""

_NOTHING: Transients = MappingProxyType({})
_PARTS = ("parameters", "batch", "gradients", "optimizer_state", "activations", "workspace")


@dataclass
class _Life:
    """A storage: what it was for, its bytes, and when it lived."""

    label: str
    size: int
    born: int
    died: float = math.inf


class Ledger(Meter):
    """A meter that remembers the life of every storage, so that the peak can be explained.

    Attributes:
        flops: Floating-point operations so far.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        """Begin to count; on the host whatever there is, else what is on the device."""
        super().__init__(device=None if device == HOST else device)
        self.clock = self.flops = 0
        self.optimizer_moments: list[tuple[int, int, int | None]] = []
        self._lives: list[_Life] = []
        self._alive: dict[int, _Life] = {}
        self._peak_moment = 0
        self._backward = -1
        self._with_scratch = 0
        self._not_known_for = scratch.unknown_cpu() if device == HOST else str(device)
        self._compiled: dict[object, int] = {}

    def record(self, label: str, things: Trackable) -> None:
        """Say what tensors are for."""
        self.track(things)
        for tensor in tensors_of(things):
            if self.device is None or tensor.device == self.device:
                self._alive[room_of(tensor)._cdata].label = label

    def note_step(self, number: int | None = None) -> None:
        """Say that the optimiser moves one parameter now, by its number, or all of them."""
        self.optimizer_moments.append((self.clock, self.live, number))

    def footprint(self, state: int = 0, transients: Transients = _NOTHING) -> Footprint:
        """Explain the peak, given the bytes of the optimiser's state and of its temporaries.

        Args:
            state: Bytes that the optimiser keeps.
            transients: Those of each step that was noted.
        """
        needs = [
            (live + transients[number], moment, transients[number])
            for moment, live, number in self.optimizer_moments
        ]
        _, moment, transient = max([(self.peak, self._peak_moment, 0), *needs], key=itemgetter(0))
        parts = self._explain(moment)
        parts["workspace"] += transient
        parts["optimizer_state"] = state
        peak = parts.total()
        process = None
        if self._not_known_for is None:
            process = max(peak, self._with_scratch + state) + PROCESS_BASE
            process += sum(self._compiled.values())
        named = {part: parts[part] for part in _PARTS}
        return Footprint(**named, peak=peak, process=process, not_known_for=self._not_known_for)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Label what is alive when a backward pass begins, then count as usual."""
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            for life in self._alive.values():
                if life.label == "workspace":
                    life.label = "activations"
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.flops += flops.of(func, args, out)
        self._add_scratch(func._schema.name, args, out)
        return out

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # As in a HollowMode, without the way through one more mode.
        return follow(func, args, kwargs)

    def _add_scratch(self, name: str, args: Sequence[Any], out: Any) -> None:
        if self._not_known_for is None:
            try:
                needed = self.live + scratch.of(name, args, out)
                self._with_scratch = max(self._with_scratch, needed)
            except scratch.NotMeasured as reason:
                self._not_known_for = str(reason)
        kept = scratch.kept(name, args)
        if kept:
            shapes = (arg.shape if isinstance(arg, Tensor) else str(arg) for arg in args)
            self._compiled[(name, *shapes)] = kept

    def _explain(self, moment: int) -> Counter[str]:
        parts: Counter[str] = Counter()
        for life in self._lives:
            if life.born <= moment < life.died:
                parts[life.label] += life.size
        return parts

    def _grown(self, key: int, size: int) -> None:
        self.clock += 1
        if key in self._alive:
            self._alive[key].size = size
        else:
            self._alive[key] = _Life("workspace", size, self.clock)
            self._lives.append(self._alive[key])
        if self.live > self.peak:
            self._peak_moment = self.clock
        super()._grown(key, size)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self.clock += 1
        self._alive.pop(key).died = self.clock
