"""Time and memory of merging 100 updates of mixed widths, against adding 100 full copies.

    python benchmarks/merge.py [--repeats N] [--smoke]

The model is a ResNet-18; the updates have widths 1, 1/2, 1/4, 1/8, 1, ... of it. They keep

- prefix: the first channels, as in HeteroFL;
- rolling: one window for all devices, as in a round of FedRolex, that wraps around in every group;
- random: a subset that each device draws for itself, as in Federated Dropout.

Both sides run on one thread and alternate, so that both meet the same machine; the figure is the
ratio of the best times. The merge weighs updates and makes its result; the other side only adds,
and adds four copies in turn, which a large cache may hold, while all updates are different.

Memory is the most tensor bytes that were live beside the server's model while updates were made,
merged and forgotten one by one and the result was made, over the bytes of the model.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

import common
from sizewise.cutting.channels import Channels, trace
from sizewise.cutting.selection import Rule, keep, prefix, random, rolling
from sizewise.cutting.shrinking import view
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, View, cut, size_in_bytes, whole
from sizewise.memory.meter import Meter
from sizewise.models import build

WIDTHS = (1, 1 / 2, 1 / 4, 1 / 8)
UPDATES = 100
LIMIT = 2.0


def rules() -> dict[str, Callable[[int], Rule]]:
    """Return, by name, which channels the update of a number keeps."""
    return {
        "prefix": lambda number: prefix,
        # ResNet-18's groups have 64 to 512 channels: this window starts four before their ends.
        "rolling": lambda number: rolling(508),
        "random": lambda number: random(torch.Generator().manual_seed(number)),
    }


def views(channels: Channels, rule: Callable[[int], Rule], count: int) -> list[View]:
    """Return the views of all updates."""
    widths = [WIDTHS[number % len(WIDTHS)] for number in range(count)]
    return [
        view(channels, keep(channels, width, rule(number))) for number, width in enumerate(widths)
    ]


def copy(tensors: Tensors, slots: View) -> dict[str, Tensor]:
    """Return a submodel after training, contiguous as what arrives from a device."""
    # Other values than the server's: tensors that nobody moved are compared with every update.
    return {local: (slot.read(tensors) + 1).contiguous() for local, slot in slots.items()}


def merged(state: Tensors, slots: list[View], updates: Iterable[Tensors]) -> dict[str, Tensor]:
    """Merge updates into a state, forgetting each before the next is asked for."""
    mean, coming = CoverageMean(state), iter(updates)
    for number, each in enumerate(slots):
        mean.add(next(coming), each, weight=float(50 + number))
    return mean.result()


def added(total: Tensors, copies: list[dict[str, Tensor]], count: int) -> None:
    """Add full copies to a total."""
    for number in range(count):
        for name, tensor in copies[number % len(copies)].items():
            total[name].add_(tensor)


def read(state: Tensors, slots: list[View]) -> None:
    """Read all devices' tensors, one device after the other."""
    for each in slots:
        cut(state, each)


def peak(state: Tensors, slots: list[View]) -> float:
    """Return the peak of live tensor bytes over the model's, while updates come one by one."""
    with Meter() as meter:
        meter.track(state, [slot.index or () for each in slots for slot in each.values()])
        before = meter.live
        merged(state, slots, (copy(state, each) for each in slots))
        return (meter.peak - before) / size_in_bytes(state)


def main() -> None:
    """Measure all rules and print a table."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    name, count, repeats = "resnet18", UPDATES, given.repeats
    if given.smoke:
        name, count, repeats = "resnet8", 8, 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(name, classes=10, image=(3, 32, 32))
    channels = trace(model, torch.empty(2, 3, 32, 32))
    state = model.state_dict()
    copies, total = [copy(state, whole(state)) for _ in range(4)], copy(state, whole(state))
    ratios: dict[str, float] = {}
    print("rule      adding     merge     ratio   reading   peak/model at 10, 20, 100 updates")
    for name, rule in rules().items():
        slots = views(channels, rule, count)
        updates = [copy(state, each) for each in slots]
        work: dict[str, common.Work] = {
            "add": partial(added, total, copies, count),
            "merge": partial(merged, state, slots, updates),
            "read": partial(read, state, slots),
        }
        times = common.best_in_turns(work, repeats)
        ratios[name] = times["merge"] / times["add"]
        adding, merging, reading = (f"{1e3 * times[each]:5.0f} ms" for each in work)
        peaks = ", ".join(f"{peak(state, slots[:some]):.2f}" for some in (10, 20, 100))
        print(f"{name:9} {adding}   {merging}   {ratios[name]:5.2f}   {reading}   {peaks}")
    print(f"{common.load_average()}; goal: at most {LIMIT:.0f}, and flat memory")
    print(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
