"""Packing by bytes: as many devices train at once on an accelerator as are predicted to fit it.

What a plan will need is known before a worker process gets it, so it waits until that is free.
Workers give everything back after each portion of work: nothing else counts.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from sizewise.common.structure import format_bytes
from sizewise.config import Config, make_method
from sizewise.errors import EngineError
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.memory.prediction import predict
from sizewise.torch_tools.placement import HOST

log = logging.getLogger(__name__)


class Accelerator:
    """One accelerator: what it has, and what those who work on it were promised.

    Attributes:
        device: Which one.
        size: Bytes that may be promised.
        room: The same, less what turned out not to be there.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size, self.room = device, size, size
        self._promised: dict[int, int] = {}
        self._beside: dict[int, int] = {}

    def fits(self, need: int) -> bool:
        """Return whether so many bytes are free; whoever is alone may try with what there is."""
        return not self._promised or sum(self._promised.values()) + need <= self.room

    def promise(self, worker: int, need: int) -> None:
        """Keep bytes for a worker."""
        self._promised[worker] = need
        total = sum(self._promised.values())
        # The most that was promised at any time while each of them has been at work.
        self._beside = {w: max(self._beside.get(w, 0), total) for w in self._promised}

    def done(self, worker: int) -> None:
        """Take back what a worker was promised."""
        del self._promised[worker], self._beside[worker]

    def ran_out(self, worker: int) -> None:
        """Promise less from now on, because a worker ran out of memory.

        Raises:
            EngineError: It was alone.
        """
        need, promised = self._promised[worker], self._beside[worker]
        if promised == need:
            raise EngineError(
                f"{self.device} is out of memory with a single device in training, which is "
                f"predicted to need {format_bytes(need)}; lower recipe.batch, set recipe.levers to "
                f"'auto', or end what else uses it, and go on with `sizewise resume`"
            )
        if promised - need >= self.room:
            return  # Another one of the same crowd was heard before.
        self.room = promised - need
        log.warning(
            "%s was out of memory when %s were promised; from now on at most %s are, and what was "
            "lost is done again",
            *(self.device, format_bytes(promised), format_bytes(self.room)),
        )


class Needs:
    """What work is predicted to need on an accelerator, found out once for each kind.

    Plans go by the bytes of the devices that are simulated. These are those of the accelerator's
    own kernels.
    """

    def __init__(self, config: Config, method: Method, device: torch.device) -> None:
        self._device, self._together = device, config.engine.together
        task = replace(method.task, device=str(HOST), predicted_for=str(device))
        self._method = make_method(config, task)

    def training(self, plans: Sequence[Plan], limit: int) -> int:
        """Return the bytes of a portion of plans that are alike.

        Raises:
            EngineError: They are more than the limit.
        """
        plan = plans[0]
        cost, submodel = self._method.cost, plan.submodel
        need = max(cost(submodel, stage).footprint.peak for stage in plan.stages)
        if self._together:
            need *= min(len(plans), self._together)
        return self._checked(need, limit, f"training the {submodel.label} model")

    def evaluation(self, state: State, size: str, limit: int) -> int:
        """Return the bytes of evaluating a deployed model.

        Raises:
            EngineError: They are more than the limit.
        """
        task = self._method.task
        if task.recipe.eval_memory is not None:
            return 0  # It runs in host memory.
        # The last batch can be half as large again; see `evaluation.batch_count`.
        inputs = task.inputs(task.recipe.eval_batch + task.recipe.eval_batch // 2)
        module = self._method.deploy(state)[size].fill()
        need = predict(module, inputs, training=False, device=self._device).peak
        if task.recipe.norm == "sbn":
            need *= 2  # Its statistics are found on a copy.
        return self._checked(need, limit, f"evaluating the {size} model")

    def _checked(self, need: int, limit: int, what: str) -> int:
        if need <= limit:
            return need
        raise EngineError(
            f"{what} takes {need:,} bytes on {self._device}, which has {limit:,} for it; lower "
            f"recipe.batch and recipe.eval_batch, set recipe.levers to 'auto', or raise "
            f"engine.device_memory"
        )
