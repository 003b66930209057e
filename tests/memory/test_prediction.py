"""The one promise: what `predict` says is what a `Meter` reads when the same step runs for real."""

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from sizewise import models
from sizewise.errors import ModelError
from sizewise.memory import prediction as memory
from sizewise.memory.prediction import Meter, predict
from sizewise.steps import optimizers
from sizewise.steps.step import rest, training_step
from sizewise.surgery.anatomy import Staged

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.01),
    "momentum": partial(SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "nesterov": partial(SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=1e-3),
    "adamw": partial(AdamW, lr=1e-3),
    "our sgd": partial(optimizers.Sgd, lr=0.01),
    "our momentum": partial(optimizers.Sgd, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "our decay": partial(optimizers.Sgd, lr=0.01, weight_decay=5e-4),
    "our adam": partial(optimizers.Adam, lr=1e-3, weight_decay=5e-4),
}


@pytest.fixture(autouse=True)
def one_thread_and_an_empty_cache():
    torch.set_num_threads(1)
    memory._costs.clear()
    memory._runs.clear()


def metered(module, inputs, targets, *, optimizer=SGD, trainable=None, step=training_step):
    """The peak of two real steps; the module is changed."""
    for name, parameter in module.named_parameters():
        chosen = trainable is None or name.startswith(tuple(f"{t}." for t in trainable))
        parameter.requires_grad_(chosen)
    rest(module)  # As training does: frozen parts are in evaluation mode.
    working = optimizer([p for p in module.parameters() if p.requires_grad])
    with Meter() as meter:
        meter.track(module, inputs, targets)
        for _ in range(2):
            step(module, working, inputs, targets)
    return meter.peak


def labels(batch):
    return torch.zeros(batch, dtype=torch.int64)


def encoder():
    """A BERT-like encoder, with dropout and attention."""

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)

        def forward(self, x):
            return self.norm(self.token(x))

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x[:, 0])

    blocks = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
    return Staged(Stem(), blocks, Head(16, 10))


@pytest.mark.parametrize(
    ("name", "batch", "width", "frozen", "optimizer"),
    [
        ("preresnet20", 2, 1.0, 0, "momentum"),
        ("preresnet20", 5, 0.5, 3, "adam"),
        ("preresnet20", 2, 0.25, 8, "sgd"),
        ("resnet18", 2, 0.25, 0, "nesterov"),
        ("resnet18", 3, 0.125, 4, "adamw"),
        ("resnet20", 2, 0.5, 5, "momentum"),
        ("densenet22", 2, 1.0, 0, "sgd"),
        ("densenet22", 3, 0.5, 4, "adam"),
        ("vit", 2, 1.0, 0, "adamw"),
        ("vit", 3, 0.5, 4, "momentum"),
        ("cnn", 1, 1.0, 0, "adam"),
        ("cnn", 7, 0.5, 1, "momentum"),
        ("mlp", 4, 1.0, 0, "adam"),
        ("mlp", 64, 0.25, 1, "nesterov"),
        ("encoder", 4, 1.0, 0, "adam"),
        ("encoder", 3, 1.0, 2, "momentum"),
    ],
)
def test_prediction_equals_the_metered_peak(name, batch, width, frozen, optimizer):
    if name == "encoder":
        model, inputs = encoder(), torch.randint(0, 50, (batch, 12))
    else:
        model = models.build(name, classes=10, image=(3, 32, 32), width=width)
        inputs = torch.randn(batch, 3, 32, 32)
    trainable = None
    if frozen:
        trainable = [*(f"blocks.{i}" for i in range(frozen, len(model.blocks))), "head"]
    how = {"optimizer": OPTIMIZERS[optimizer], "trainable": trainable}
    footprint = predict(model, inputs.to("meta"), **how)
    assert footprint.peak == metered(model, inputs, labels(batch), **how)
    parts = asdict(footprint)
    process, unknown = parts.pop("process"), parts.pop("not_known_for")
    assert (process is None) != (unknown is None)
    assert process is None or process > footprint.peak
    assert parts.pop("peak") == sum(parts.values())
    assert min(parts.values()) >= 0
    assert json.loads(json.dumps(parts)) == parts


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    learns=st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    batch=st.integers(1, 9),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_prediction_is_exact_for_any_chain_and_any_frozen_layers(widths, learns, batch, optimizer):
    sizes = [6, *widths, 3]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    module = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))
    chosen = [str(2 * i) for i in range(len(layers)) if learns[i]] or ["0"]
    inputs, how = torch.randn(batch, 6), {"optimizer": OPTIMIZERS[optimizer], "trainable": chosen}
    assert predict(module, inputs, **how).peak == metered(module, inputs, labels(batch), **how)


def small():
    return nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 4))


def test_the_module_and_the_random_numbers_are_left_alone():
    module = small().eval()
    module[0].requires_grad_(False)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    predict(module, torch.randn(3, 6, generator=torch.Generator()), trainable=["0"])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]
    assert [p.grad for p in module.parameters()] == [None] * 4
    assert not module.training


def test_a_module_on_the_meta_device_costs_the_same():
    inputs = torch.empty(3, 6)
    assert predict(small().to("meta"), inputs) == predict(small(), inputs)


def test_what_the_parts_say():
    module, inputs = nn.Linear(100, 10), torch.empty(2, 100)
    footprint = predict(module, inputs, optimizer=OPTIMIZERS["momentum"])
    assert footprint.parameters == 4 * 1010
    assert footprint.batch == 4 * 200 + 8 * 2
    assert footprint.optimizer_state == 4 * 1010
    assert footprint.gradients == 4 * 1010  # the optimiser's step is the peak of so flat a model
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(20)))
    kept = predict(deep, torch.empty(500, 10)).activations
    assert 20 * 4 * 500 * 10 <= kept <= 22 * 4 * 500 * 10  # every tanh, and what the loss keeps


def test_inference_keeps_nothing_for_a_backward_pass():
    model = models.build("preresnet20", classes=10, image=(3, 32, 32))
    inputs, targets = torch.randn(4, 3, 32, 32), labels(4)
    footprint = predict(model, inputs, training=False)
    assert footprint.activations == footprint.gradients == footprint.optimizer_state == 0
    model.eval()
    with torch.no_grad(), Meter() as meter:
        meter.track(model, inputs, targets)
        model(inputs)
    assert footprint.peak == meter.peak < predict(model, inputs).peak / 2


def mutual_step(module, optimizer, inputs, targets):
    """Two networks that learn from each other, as on FeDepth's rich devices."""
    optimizer.zero_grad(set_to_none=True)
    first, second = (network(inputs) for network in module)
    loss = F.cross_entropy(first, targets) + F.cross_entropy(second, targets)
    for student, teacher in ((first, second), (second, first)):
        goal = teacher.detach().softmax(1)
        loss = loss + F.kl_div(student.log_softmax(1), goal, reduction="batchmean")
    loss.backward()
    optimizer.step()


def heads_loss(module, inputs, targets):
    """Every block feeds a head of its own."""
    total, x = torch.zeros(()), inputs
    for block, head in zip(module["blocks"], module["heads"], strict=True):
        x = block(x)
        total = total + F.cross_entropy(head(x), targets)
    return total


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("case", ["mutual", "heads", "clip", "checkpoint", "unused", "tied"])
def test_other_steps_and_models_are_exact(case, optimizer):
    module, step = small(), training_step
    if case == "mutual":
        module, step = nn.ModuleList([small(), small()]), mutual_step
    if case == "heads":
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4))
        heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))
        module = nn.ModuleDict({"blocks": blocks, "heads": heads})
        step = partial(training_step, loss=heads_loss)
    if case == "clip":
        step = partial(training_step, clip=1.0)
    if case == "checkpoint":
        step = partial(
            training_step,
            loss=lambda m, x, y: F.cross_entropy(
                m[3](checkpoint(m[:3], x, use_reentrant=False)), y
            ),
        )
    if case == "unused":  # learns, but gets no gradient, so the optimiser keeps nothing for it
        module.register_parameter("spare", nn.Parameter(torch.zeros(1000)))
    if case == "tied":
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        module[2].weight = module[0].weight
    inputs, how = torch.randn(5, 6), {"optimizer": OPTIMIZERS[optimizer], "step": step}
    assert predict(module, inputs, **how).peak == metered(module, inputs, labels(5), **how)


def test_a_proximal_step_holds_what_it_received():
    module, inputs = small(), torch.randn(5, 6)
    step = partial(training_step, proximal=0.1)
    footprint = predict(module, inputs, step=step, anchored=True)
    anchors = [parameter.detach().clone() for parameter in module.parameters()]
    working, targets = SGD(module.parameters()), labels(5)
    with Meter() as meter:
        meter.track(module, inputs, targets, anchors)
        for _ in range(2):
            step(module, working, inputs, targets, anchors)
    assert footprint.parameters == 2 * predict(module, inputs).parameters
    assert meter.peak == footprint.peak


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.head = kind(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


class Looking(nn.Module):
    """Looks at its data, which a prediction without data cannot."""

    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x):
        x = self.layers(x)
        return x * 2 if x.abs().sum().item() >= 0 else x


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks_are_exact(kind):
    module, inputs = Recurrent(kind), torch.randn(3, 7, 6)
    assert predict(module, inputs).peak == metered(module, inputs, labels(3))


def test_a_model_that_looks_at_its_data_takes_one_real_step_on_a_copy():
    module, inputs = Looking(), torch.randn(3, 6)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    peaks = {predict(module, inputs).peak, predict(module.to("meta"), inputs.to("meta")).peak}
    assert torch.equal(torch.get_rng_state(), random)
    module = Looking()
    module.load_state_dict(before)
    assert peaks == {metered(module, inputs, labels(3))}


def test_a_broken_model_says_what_is_wrong_with_it():
    with pytest.raises(ModelError, match=r"cannot take a step: .*shapes cannot be multiplied"):
        predict(small(), torch.empty(3, 7))


def test_nothing_to_train():
    with pytest.raises(ModelError, match="'1'"):
        predict(small(), torch.empty(3, 6), trainable=["1"])
    with pytest.raises(ModelError, match="no parameter that learns"):
        predict(small().requires_grad_(False), torch.empty(3, 6))


class Scaled(nn.Linear):
    """Two of these have equal tensors and need different bytes."""

    def __init__(self, copies):
        super().__init__(6, 4)
        self.copies = copies

    def forward(self, x):
        return sum(super(Scaled, self).forward(x).exp() for _ in range(self.copies))


def test_the_cache_knows_equal_modules_from_different_ones():
    runs = []

    def step(*args):
        runs.append(1)
        training_step(*args)

    ask = partial(predict, inputs=torch.empty(3, 6), step=step)
    assert ask(Scaled(2)) == ask(Scaled(2))
    assert len(runs) == 1
    assert ask(Scaled(3)).peak > ask(Scaled(2)).peak
    assert len(runs) == 2
    ask(Scaled(2), inputs=torch.empty(4, 6))
    ask(Scaled(2), trainable=["bias"])
    assert len(runs) == 4
    plain, adam = ask(Scaled(2)), ask(Scaled(2), optimizer=OPTIMIZERS["adam"])
    assert adam.optimizer_state > plain.optimizer_state == 0
    assert adam == ask(Scaled(2), optimizer=partial(Adam, lr=1e-3))
    assert len(runs) == 4, "the same step with another optimiser is not run again"


@dataclass
class Record:
    """Like the config that a transformer's layers keep: equal to others, and without a hash."""

    number: int

    def __index__(self):
        return self.number


def test_the_cache_looks_into_records():
    runs = []

    def step(*args):
        runs.append(1)
        training_step(*args)

    ask = partial(predict, inputs=torch.empty(3, 6), step=step)
    module = Scaled(Record(2))
    two = ask(module)
    assert ask(Scaled(Record(2))) == two
    assert len(runs) == 1
    module.copies.number = 3
    assert ask(module).peak > two.peak
    assert len(runs) == 2
