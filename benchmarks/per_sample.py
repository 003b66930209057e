"""Time and bytes of gradients that are clipped sample by sample, three ways, over a plain step.

    python benchmarks/per_sample.py [--repeats N] [--smoke]

- one by one: a backward pass for each sample, whose gradient is clipped and added;
- torch.func: the gradients of a whole batch by `vmap(grad)`, then clipped and added;
- Opacus: hooks of `GradSampleModule` that gather them in one backward pass.

All give the same sum, which is checked. The plain side is one backward pass over the batch. Both
run on one thread, in turns; bytes are the metered peak of live tensors.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import common
from sizewise.memory.meter import Meter
from sizewise.models import build
from sizewise.steps.step import compare, cross_entropy

CLIP = 1.0


def convolutions() -> nn.Module:
    """Return a small convolutional network with group norms: batch norms mix samples."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(before, after, 3, stride=2, padding=1)
        layers += [conv, nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "mlp": (partial(build, "mlp", classes=10, image=(1, 8, 8)), (1, 8, 8)),
    "cnn with group norms": (convolutions, (3, 32, 32)),
    "vit": (partial(build, "vit", classes=10, image=(3, 32, 32)), (3, 32, 32)),
}

Way = Callable[[nn.Module, Tensor, Tensor], list[Tensor]]


def clipped(gradients: list[Tensor]) -> list[Tensor]:
    """Return the sums (...) of gradients (B, ...), each sample's clipped over all tensors."""
    squares = sum((g.flatten(1).square().sum(1) for g in gradients), torch.zeros(()))
    scale = (CLIP / squares.sqrt()).clamp(max=1.0)
    return [torch.tensordot(scale, g, dims=1) for g in gradients]


def plain(module: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradient of the batch."""
    value = cross_entropy(module, inputs, labels)
    return list(torch.autograd.grad(value, list(module.parameters())))


def one_by_one(module: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the sum of clipped gradients, a sample at a time."""
    total = [torch.zeros_like(p) for p in module.parameters()]
    for number in range(len(labels)):
        own = plain(module, inputs[number : number + 1], labels[number : number + 1])
        norm = torch.stack([g.square().sum() for g in own]).sum().sqrt()
        scale = (CLIP / norm).clamp(max=1.0)
        for sofar, gradient in zip(total, own, strict=True):
            sofar.add_(gradient * scale)
        del own, gradient
    return total


def by_vmap(module: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the same, the batch at once."""

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return compare(functional_call(module, parameters, image[None]), label[None])

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    return clipped(list(each(parameters, inputs, labels).values()))


def by_opacus(module: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the same from Opacus's hooks; the module is wrapped."""
    module.zero_grad(set_to_none=True)
    cross_entropy(module, inputs, labels).backward()  # type: ignore[no-untyped-call]
    found = clipped([p.grad_sample for p in module.parameters()])  # type: ignore[attr-defined]
    for parameter in module.parameters():
        parameter.grad_sample = None  # type: ignore[attr-defined]
    return found


def peak(way: Way, module: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    """Return the most bytes that are live, those of the model and its batch among them."""
    with Meter() as meter:
        meter.track(module, inputs, labels)
        way(module, inputs, labels)
        return meter.peak


def main() -> None:
    """Measure all models and print a table."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus's hooks do without what torch recommends.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {"mlp": MODELS["mlp"]} if given.smoke else MODELS
    ways: dict[str, Way] = {"one by one": one_by_one, "torch.func": by_vmap, "Opacus": by_opacus}
    print(common.head("model", "batch", "way", "time over plain", "peak MB", "peak over plain"))
    for name, (make, image) in models.items():
        module = make()
        usable = dict(ways)
        try:
            wrapped = GradSampleModule(make())
        except (NotImplementedError, ValueError) as error:
            print(f"| {name} | | Opacus | {type(error).__name__} | | |")
            del usable["Opacus"]
        else:
            wrapped.load_state_dict({f"_module.{n}": t for n, t in module.state_dict().items()})
        for batch in (4,) if given.smoke else (8, 32):
            inputs, labels = torch.randn(batch, *image), torch.arange(batch) % 10
            given_to = {each: wrapped if each == "Opacus" else module for each in usable}
            sums = [way(given_to[each], inputs, labels) for each, way in usable.items()]
            for other in sums[1:]:
                for one, two in zip(sums[0], other, strict=True):
                    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
            work: dict[str, common.Work] = {"plain": partial(plain, module, inputs, labels)}
            work |= {e: partial(way, given_to[e], inputs, labels) for e, way in usable.items()}
            repeats = 1 if given.smoke else given.repeats
            times = common.best_in_turns(work, repeats, time.process_time)
            before = peak(plain, module, inputs, labels)
            for each, way in usable.items():
                bytes_of = peak(way, given_to[each], inputs, labels)
                print(
                    f"| {name} | {batch} | {each} | {times[each] / times['plain']:.2f} "
                    f"| {bytes_of / 1e6:.2f} | {bytes_of / before:.2f} |",
                    flush=True,
                )
    print(common.load_average())


if __name__ == "__main__":
    main()
