"""One round by hand, for tests of methods whose devices remember and tell of their samples."""

from collections.abc import Sequence
from dataclasses import replace

from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.exchange.plan import Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State
from sizewise.exchange.view import check
from sizewise.fleet.devices import Device


def do_round(
    runner: DeviceRunner, state: State, round_index: int, devices: Sequence[Device]
) -> tuple[State, list[Update]]:
    """Train devices, check what they send, merge it, and let the devices remember."""
    method = runner.method
    plans = [method.plan(state, device, round_index) for device in devices]
    updates: list[Update] = []
    for update in LocalEngine(runner).train(state, plans):
        assert isinstance(update, Update), update
        view = method.submodels.view(update.plan.submodel)
        check(update.tensors, with_rows(view, update.rows, state.tensors), state.tensors)
        method.traffic(update.plan, update.samples).check(update.sample_payload)
        updates.append(update)
    merged = method.merge(state, updates)
    kept = {u.plan.device: u.device_state for u in updates if u.device_state}
    return replace(merged, devices={**state.devices, **kept}), updates
