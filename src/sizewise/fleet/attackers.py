"""Who attacks in a simulated run, and what becomes of what these devices send.

Everything happens on the server's side of the simulation, after the engine: so the bits do not
depend on the number of workers, and machines of their own are never made to attack.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sizewise.common import rng
from sizewise.common.structure import nearest
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Refusal, Update
from sizewise.exchange.view import Tensors, View
from sizewise.fleet import attacks
from sizewise.fleet.attacks import AttackConfig
from sizewise.fleet.devices import Device, Fleet

DEFAULT_SHARE = 0.2


@dataclass(frozen=True)
class Attackers:
    """The attackers of a fleet.

    Attributes:
        attacks: What each of them does, by device number.
        seed: The run's.
        disguises: Example devices of the classes that attackers claim to be of, by name.
    """

    attacks: Mapping[int, AttackConfig]
    seed: int
    disguises: Mapping[str, Device]

    def __str__(self) -> str:
        kinds = dict.fromkeys(attack.kind for attack in self.attacks.values())
        count = len(self.attacks)
        who = "1 device attacks" if count == 1 else f"{count:,} devices attack"
        return f"{who} ({', '.join(kinds)})"

    def of_kind(self, kind: str) -> list[int]:
        """Return the numbers of the devices that attack in one way."""
        return sorted(n for n, attack in self.attacks.items() if attack.kind == kind)

    def seen(self, device: Device) -> Device:
        """Return a device as the server sees it: of the class that it claims to be of."""
        attack = self.attacks.get(device.id)
        if attack is None or attack.claims is None:
            return device
        claimed = self.disguises[attack.claims]
        return replace(claimed, id=device.id, turn=device.turn)

    def at_work(
        self,
        tensors: Tensors,
        outcomes: Iterable[Update | Refusal],
        view_of: Callable[[Update], View],
    ) -> Iterator[Update | Refusal]:
        """Yield what the devices of a round send, attackers what they make of it.

        Where somebody attacks, the whole round is gathered first: attackers may know it all.

        Args:
            tensors: The server's tensors before the round.
            outcomes: What the devices trained, in order.
            view_of: Where an update's tensors live.
        """
        if not self.attacks:
            yield from outcomes
            return
        came, crowd = list(outcomes), attacks.Crowd(tensors)
        for outcome in came:
            if isinstance(outcome, Update) and outcome.plan.device not in self.attacks:
                crowd.add(outcome.tensors, view_of(outcome))
        for outcome in came:
            if isinstance(outcome, Refusal) or outcome.plan.device not in self.attacks:
                yield outcome
                continue
            plan, attack = outcome.plan, self.attacks[outcome.plan.device]
            generator = rng.torch_generator(self.seed, "attack", plan.round, plan.device)
            trained, view = outcome.tensors, view_of(outcome)
            sent = attacks.sent(attack, trained, view, tensors, crowd, generator)
            samples = max(1, round(attack.samples * outcome.samples))
            yield replace(outcome, tensors=sent, samples=samples)


def drawn(configs: Sequence[AttackConfig], fleet: Fleet, seed: int) -> Attackers:
    """Return the attackers of a fleet; no device attacks in two ways.

    Raises:
        ConfigError: A device class is unknown, or has too few devices that do not attack yet.
    """
    found: dict[int, AttackConfig] = {}
    classes = {device.group: device for device, _, _ in fleet.classes()}
    for number, attack in enumerate(configs):
        for key in ("group", "claims"):
            name = getattr(attack, key)
            if name is not None and name not in classes:
                hint = nearest(name, classes)
                raise ConfigError(f"fleet.attack.{key} names no device class {name!r}; {hint}")
        members = [
            device
            for start, group in zip(fleet.starts, fleet.groups, strict=True)
            if attack.group in (None, group.name)
            for device in range(start, start + group.count)
        ]
        share = DEFAULT_SHARE if attack.share is None else attack.share
        wanted = attack.count or max(1, round(share * len(members)))
        free = [device for device in members if device not in found]
        if wanted > len(free):
            raise ConfigError(
                f"fleet.attack asks for {wanted} attackers of {len(free)} devices that do not "
                f"attack yet; lower its count or share"
            )
        generator = rng.python_generator(seed, "attackers", number)
        found |= dict.fromkeys(generator.sample(free, wanted), attack)
    return Attackers(found, seed, classes)


def flipped(labels: torch.Tensor, rows: torch.Tensor, classes: int) -> torch.Tensor:
    """Return labels, int64 (N,), in which some rows have the classes in reverse."""
    return labels.index_copy(0, rows, classes - 1 - labels[rows])
