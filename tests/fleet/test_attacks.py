"""What attackers send, by hand, and who they are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sizewise.common.rng import torch_generator
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, Refusal, Submodel, Update
from sizewise.exchange.view import TensorSlice, View, whole
from sizewise.fleet.attackers import Attackers, drawn, flipped
from sizewise.fleet.attacks import AttackConfig, Crowd, sent
from sizewise.fleet.devices import FleetConfig, GroupConfig
from sizewise.fleet.making import make_fleet

SERVER = {"w": torch.tensor([1.0, 1.0, 1.0]), "n": torch.tensor(3)}
GROUPS = (GroupConfig(6, 1000, "small"), GroupConfig(4, 5000, "large"))
FLEET = make_fleet(FleetConfig(group=GROUPS), lambda ratio: 0)


def crowd(*changes: list[float]) -> Crowd:
    """Return honest devices that hold the first entries, given how they changed them."""
    found = Crowd(SERVER)
    for change in changes:
        view = {"w": TensorSlice("w", (slice(0, len(change)),))}
        found.add({"w": 1 + torch.tensor(change, dtype=torch.float32)}, view)
    return found


def attacked(kind: str, known: Crowd | None = None, **keys: Any) -> list[float]:
    """Return what an attacker sends that trained (1, 1, 1) to (2, 3, 5)."""
    update = {"w": torch.tensor([2.0, 3.0, 5.0]), "n": torch.tensor(4)}
    attack = AttackConfig(kind, **keys)  # type: ignore[arg-type]
    found = sent(
        attack, update, whole(SERVER), SERVER, known or crowd(), torch_generator(0, "attack")
    )
    assert found["n"].item() == 4
    assert found["w"].dtype == torch.float32
    return [round(value, 5) for value in found["w"].tolist()]


def test_attacks_by_hand() -> None:
    assert attacked("sign-flip") == [0, -1, -3]
    assert attacked("sign-flip", strength=2) == [-1, -3, -7]
    assert attacked("scaling") == [11, 21, 41]
    assert attacked("label-flip") == attacked("lie", samples=2) == [2, 3, 5]
    honest = crowd([1, 1], [3, 1])  # Of the last entry, no honest device knows anything.
    assert attacked("inner-product", honest) == [-3, -1, 1]
    assert attacked("little-is-enough", honest, strength=2) == [1, 2, 1]
    assert attacked("outer", honest) == [2, 3, -39]
    assert attacked("outer") == [-9, -19, -39]


def test_noise_is_as_large_as_the_change_and_the_same_every_time() -> None:
    server = {"w": torch.zeros(100_000)}
    update = {"w": torch.full((100_000,), 0.5)}
    attack = AttackConfig("noise", strength=4)
    first, second = (
        sent(attack, update, whole(server), server, Crowd(server), torch_generator(1, "attack"))[
            "w"
        ]
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert float(first.std()) == pytest.approx(2, rel=0.02)
    assert float(first.mean()) == pytest.approx(0, abs=0.05)


def test_attackers_are_drawn_by_the_seed_and_attack_in_one_way() -> None:
    two = (AttackConfig("noise"), AttackConfig("lie", share=0.5, group="large", samples=3))
    found = drawn(two, FLEET, seed=0)
    assert found.attacks == drawn(two, FLEET, seed=0).attacks
    assert len({tuple(drawn(two, FLEET, seed).attacks) for seed in range(9)}) > 1
    assert (len(found.of_kind("noise")), len(found.of_kind("lie"))) == (2, 2)
    assert set(found.of_kind("lie")) <= {6, 7, 8, 9}
    assert str(found) == "4 devices attack (noise, lie)"


def test_a_device_is_seen_as_what_it_claims_to_be() -> None:
    found = drawn((AttackConfig("lie", group="small", count=1, claims="large"),), FLEET, seed=0)
    (liar,) = found.attacks
    seen = found.seen(FLEET.device(liar, 0))
    assert (seen.id, seen.group, seen.memory) == (liar, "large", 5000)
    honest = FLEET.device(9, 0)
    assert found.seen(honest) is honest


def update(device: int, tensor: Tensor) -> Update:
    plan = Plan(device, 0, "any", Submodel(), ())
    return Update(plan, {"w": tensor}, samples=10, steps=1, loss=0.0)


def test_only_attackers_send_something_else() -> None:
    attacks = {1: AttackConfig("inner-product", samples=5)}
    outcomes = [
        update(1, torch.zeros(3)),
        update(0, torch.tensor([2.0, 3.0, 5.0])),
        Refusal(2, 0, "any", "no data"),
    ]

    def view(of: Update) -> View:
        return whole(SERVER)

    first, second, third = Attackers(attacks, 0, {}).at_work(SERVER, outcomes, view)
    assert isinstance(first, Update)
    assert first.tensors["w"].tolist() == [-1, -3, -7]
    assert first.samples == 50
    assert second is outcomes[1]
    assert third is outcomes[2]
    assert list(Attackers({}, 0, {}).at_work(SERVER, outcomes, view)) == outcomes


def test_labels_are_flipped_in_the_attackers_rows_alone() -> None:
    labels = torch.tensor([0, 1, 2, 3])
    assert flipped(labels, torch.tensor([0, 3]), 10).tolist() == [9, 1, 2, 6]
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "lie"}, "needs to know about what"),
        ({"kind": "noise", "share": 0.5, "count": 2}, "only one of"),
        ({"kind": "noise", "share": 0.0}, "above 0"),
        ({"kind": "noise", "count": 0}, "at least 1"),
        ({"kind": "noise", "strength": -1.0}, "must be a positive number"),
        ({"kind": "label-flip", "strength": 2.0}, "says nothing to the kind 'label-flip'"),
        ({"kind": "noise", "group": "larg"}, "did you mean 'large'"),
        ({"kind": "lie", "claims": "huge"}, "names no device class 'huge'"),
        ({"kind": "noise", "count": 5, "group": "large"}, "asks for 5 attackers of 4"),
    ],
)
def test_attacks_that_make_no_sense_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drawn((AttackConfig(**keys),), FLEET, seed=0)
