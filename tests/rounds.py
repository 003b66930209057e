"""One round by hand, for tests of methods whose devices remember and tell of their samples."""

from collections.abc import Sequence
from dataclasses import replace

from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
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
        method.check(state, update)
        updates.append(update)
    merged = method.merge(state, updates)
    kept = {**state.devices, **{u.plan.device: u.memory for u in updates if u.memory}}
    return replace(merged, devices=kept), updates
