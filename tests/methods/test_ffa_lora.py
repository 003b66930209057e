"""FFA-LoRA: A never moves and never travels, so the mean of B is exact."""

from collections.abc import Callable

import torch

from sizewise.exchange.state import State
from sizewise.families.lora.adapters import DOWN, UP
from sizewise.methods.fedlora import FedLoRA
from sizewise.methods.ffa_lora import FFALoRA
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_a_stays_as_it_is_drawn(make_task: Tasks, federate: Callable[..., State]) -> None:
    method = FFALoRA(make_task(), FFALoRA.Options(ranks=(2,)))
    state, layer = federate(method, rounds=2), "blocks.0.linear"
    assert layer + UP in state.tensors
    assert layer + DOWN not in state.tensors
    deployed = method.deploy(state)["rank 2"].fill()
    drawn = FedLoRA(make_task(), FedLoRA.Options(ranks=(2,))).setup().tensors[layer + DOWN]
    assert torch.equal(deployed.get_parameter(layer + DOWN), drawn)


def test_every_machine_draws_the_same(make_task: Tasks) -> None:
    one, other = (FFALoRA(make_task(args={"hidden": [6] * 4})) for _ in range(2))
    name = "blocks.2.linear" + DOWN
    drawn = one.submodels.build(one.main).get_parameter(name)
    # Also with adapters in fewer blocks, and of a lower rank.
    fewer = other.submodels.build(type(one.main)(2, 1)).get_parameter(name)
    assert torch.equal(drawn[:2], fewer)
