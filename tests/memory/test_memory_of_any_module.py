"""Whatever a module does, `predict` gives what a `Meter` reads, or one sentence."""

import pytest
import torch
from test_prediction import labels, metered, small
from torch import nn

from sizewise.errors import ModelError
from sizewise.memory.prediction import predict


class Keeping(nn.Module):
    """Keeps what it computes as an attribute, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(6, 50), nn.Linear(50, 4)
        self.kept = None

    def forward(self, x):
        hidden = self.first(x).relu()
        if self.how == "graph":
            self.kept = hidden
        if self.how == "values":
            self.kept = hidden.detach().clone()
        if self.how == "containers":
            self.kept = [{"hidden": (hidden,)}]
        return self.last(hidden)


@pytest.mark.parametrize("how", ["graph", "values", "containers"])
def test_a_used_model_costs_what_a_fresh_one_does(how):
    inputs = torch.randn(200, 6)
    fresh = predict(Keeping(how), inputs)
    # From the second step on, what the first one kept is alive beside what is computed anew.
    assert fresh.peak == metered(Keeping(how), inputs, labels(200))
    used = Keeping(how)
    used(torch.randn(1000, 6))
    assert predict(used, inputs) == fresh
    metered(used, inputs, labels(200))
    assert predict(used, inputs) == fresh
    assert used.kept is not None
    # A backward pass needs it anyway, but for copies; a forward pass does not.
    kept, without = 4 * 200 * 50, Keeping("not at all")
    assert fresh.peak - predict(without, inputs).peak == (kept if how == "values" else 0)
    alone = [predict(model, inputs, training=False).peak for model in (used, without)]
    assert alone[0] - alone[1] == kept


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(6, 6), error

    def forward(self, x):
        raise self.error


class Uncopied(nn.Linear):
    def __deepcopy__(this, memo):  # noqa: N805
        raise TypeError("there is only one of me")


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (Failing(KeyError("image")), "cannot take a step: layer '1', a Failing: KeyError: 'image'"),
        (Failing(AssertionError()), "cannot take a step: layer '1', a Failing: AssertionError"),
        (Failing(ValueError("no\nthanks")), "layer '1', a Failing: ValueError: no"),
        (Uncopied(6, 6), "cannot be copied: layer '1', a Uncopied: there is only one of me"),
        (nn.LazyLinear(6), "cannot take a step: .*uninitialized"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_whatever_a_module_does_it_is_one_sentence(layer, sentence, training):
    module = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(ModelError, match=f"^Sequential .*{sentence}") as caught:
        predict(module, torch.empty(3, 6), training=training)
    assert "\n" not in str(caught.value)


def test_a_module_that_holds_itself_in_a_list_has_a_figure():
    module, inputs = small(), torch.empty(3, 6)
    expected = predict(module, inputs)
    module.around = [module]
    module.around.append(module.around)
    assert predict(module, inputs) == expected


def test_inputs_that_cannot_be_counted_are_one_sentence():
    with pytest.raises(ModelError, match=r"Linear cannot take a step: .*has no len"):
        predict(nn.Linear(6, 4), 3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "weight_norm", "spectral_norm"])
def test_modules_that_torch_has_changed_are_exact(kind):
    def build():
        module = small()
        if kind == "scripted":
            module[3] = torch.jit.script(module[3])
        else:
            getattr(nn.utils, kind)(module[0])
        return module

    inputs = torch.randn(5, 6)
    expected = metered(build(), inputs, labels(5))
    used = build()
    used(inputs)
    assert predict(build(), inputs).peak == predict(used, inputs).peak == expected
