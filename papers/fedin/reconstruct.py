"""Private images, reconstructed from the features that FedIN shares. An honest warning.

    python papers/fedin/reconstruct.py [--data digits] [--smoke]

Trains FedIN for two rounds, then looks over the server's shoulder: from the batch of early features
that a device shared, and the extractor that it sent with them, gradient descent finds images that
have these features. It knows nothing else: no image, no label, no other model. Any device that gets
the features in its turn can do the same with the averaged extractor.

Writes `reconstruct.DATA.svg`, originals and reconstructions, plain, clipped and with noise, and
`.md`: the error of a pixel, and how often the reconstruction of an image is closer to its original
than to any other image of the data set; guessing would be right once in as many times as it has
images. The embedded digits need no data; `--data cifar10` does. Half a minute for digits.
"""

from dataclasses import replace

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F

from shared import common, inside
from sizewise import config
from sizewise.common import rng
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.families.disclosure import Blur
from sizewise.fleet.devices import Device
from sizewise.methods.fedin import EARLY, FedIN
from sizewise.runs import preparation

BATCH, VICTIM, ROUNDS, STEPS, SHOWN = 16, 0, 2, 600, 8
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "clip 8": {"clip": 8.0},
    "noise 0.25": {"noise": 0.25},
    "noise 1": {"noise": 1.0},
    "clip 8, noise 1": {"clip": 8.0, "noise": 1.0},
    "noise 4": {"noise": 4.0},
}


def prepared(data: str, samples: int) -> DeviceRunner:
    """Return the method and the data of a small federation."""
    chosen = config.from_dict(
        {
            "rounds": ROUNDS + 1,
            "model": {"name": "fedin_b", "args": {"base": 16}},
            "data": {"name": data, "train_limit": samples, "test_limit": 100},
            "fleet": {"devices": 4, "per_round": 4},
            "method": {"name": "fedin"},
            "recipe": {"optimizer": "adam", "lr": 0.001, "weight_decay": 0.0, "batch": BATCH},
        }
    )
    setting = preparation.prepare(chosen)
    return DeviceRunner(setting.method, setting.dataset, setting.partition)


def trained(runner: DeviceRunner, state: State, round_index: int, devices: range) -> list[Update]:
    """Return what devices send in a round."""
    return [inside.trained(runner, state, Device(number, "any"), round_index) for number in devices]


def after_some_rounds(runner: DeviceRunner) -> State:
    """Return the state that the victim's round starts from."""
    state = runner.method.setup()
    for round_index in range(ROUNDS):
        updates = trained(runner, state, round_index, range(4))
        state = runner.method.merge(state, updates)
        state = replace(state, devices={u.plan.device: u.device_state for u in updates})
    return state


def originals(runner: DeviceRunner) -> Tensor:
    """Return the images whose features the victim shares: its last batch of full size."""
    rows = runner.partition.shard(VICTIM)
    generator = rng.torch_generator(runner.method.task.seed, "batches", ROUNDS, VICTIM)
    order = rows[torch.randperm(len(rows), generator=generator)]
    last = [batch for batch in torch.split(order, BATCH) if len(batch) == BATCH][-1]
    return runner.transform(runner.dataset.train_inputs[last], None)


def attack(
    stem: nn.Module,
    features: Tensor,
    shape: tuple[int, ...],
    bounds: Tensor,
    clip: float | None,
    steps: int,
) -> Tensor:
    """Return images (B, C, H, W) whose features are as given, as far as there are such.

    Args:
        stem: The extractor that the device sent, in training mode as when it made the features.
        features: What the device shared, (B, ...).
        shape: Shape of an image.
        bounds: The darkest and the brightest value of each channel, (2, C, 1, 1).
        clip: How devices clip what they share: everybody knows that, so the guess is clipped too.
        steps: Of gradient descent.
    """
    blur, unused = Blur(clip), torch.Generator()
    guess = bounds.mean(0).expand(len(features), *shape).clone()
    guess += 0.1 * torch.randn(guess.shape, generator=torch.Generator().manual_seed(0))
    guess.requires_grad_()
    optimizer = torch.optim.Adam([guess], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        image = guess.clamp(bounds[0], bounds[1])
        rough = image.diff(dim=2).abs().mean() + image.diff(dim=3).abs().mean()
        loss = F.mse_loss(blur.blur(stem(image), unused), features) + 0.002 * rough
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return guess.detach().clamp(bounds[0], bounds[1])


def main() -> None:
    """Attack each setting, draw and count."""
    parser = common.parser(__doc__)
    parser.add_argument("--data", default="digits")
    common.add_smoke(parser)
    given = parser.parse_args()
    data, kind, steps, samples = given.data, given.data, STEPS, 1000
    if given.smoke:
        kind, steps, samples = common.SMOKE, 2, 100
    torch.set_num_threads(1)  # as in a run
    runner = prepared(data, samples)
    state, truth = after_some_rounds(runner), originals(runner)
    everything = runner.transform(runner.dataset.train_inputs, None)
    channels = runner.dataset.shape[0]
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    bounds = runner.transform(ends.expand(2, channels, 1, 1), None)
    spread = float((bounds[1] - bounds[0]).mean())
    rows, signals = {"original": truth}, dict[float | None, float]()
    lines = common.table("", "error of a pixel, %", "recognised", "signal to noise")
    for name, options in SETTINGS.items():
        method = FedIN(runner.method.task, FedIN.Options(**options))  # type: ignore[arg-type]
        (update,) = trained(
            replace(runner, method=method), state, ROUNDS, range(VICTIM, VICTIM + 1)
        )
        stem = inside.sent_extractor(method, update)
        features = update.sample_payload[EARLY]
        clip = options.get("clip")
        found = attack(stem, features, runner.dataset.shape, bounds, clip, steps)
        rows[name] = found
        error = float((found - truth).abs().mean()) / spread
        apart = torch.cdist(found.flatten(1), everything.flatten(1))
        own = torch.cdist(found.flatten(1), truth.flatten(1)).diagonal()
        right = int((apart.min(1).values >= own - 1e-4).sum())
        if name in ("plain", "clip 8"):
            signals[clip] = float(features.std())
        noise = options.get("noise")
        ratio = "no noise" if noise is None else f"{signals[clip] / noise:.2f}"
        lines.append(f"| {name} | {100 * error:.1f} | {right} of {BATCH} | {ratio} |")
    figure, panels = pyplot.subplots(
        len(rows), SHOWN, figsize=(SHOWN * 0.9, len(rows)), layout="constrained"
    )
    for (name, images), line in zip(rows.items(), panels, strict=True):
        shown = ((images - bounds[0]) / (bounds[1] - bounds[0])).movedim(1, -1).numpy()
        for image, axes in zip(shown[:SHOWN], line, strict=True):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    common.save(figure, common.target(__file__, kind, "svg"))
    common.write(lines, common.target(__file__, kind, "md"))


if __name__ == "__main__":
    main()
