"""Recurrent layers: the hidden size shrinks in every gate, layer and direction."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from dropped_entries import drop_entries
from sizewise.cutting import keep, random, shrink, trace, verify, view
from sizewise.exchange.view import cut
from sizewise.memory.prediction import Meter, predict
from sizewise.steps.step import training_step

KINDS: dict[str, Any] = {
    "lstm": partial(nn.LSTM, num_layers=2),
    "lstm both ways": partial(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, projected": partial(nn.LSTM, proj_size=4),
    "lstm, time first": partial(nn.LSTM, bias=False),
    "gru": partial(nn.GRU, num_layers=2, bidirectional=True),
    "rnn": partial(nn.RNN, nonlinearity="tanh"),
}
SIGNALS = torch.empty(2, 7, 6, device="meta")


class Reader(nn.Module):
    """A recurrent network between linear layers; its last output is read, and its last state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 10)
        self.rnn = KINDS[kind](10, 8, batch_first="time first" not in kind)
        given = 4 if self.rnn.proj_size else 8
        self.head = nn.Linear(given * (2 if self.rnn.bidirectional else 1), 3)
        self.state = nn.Linear(given, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        outputs, states = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        last = states[0] if isinstance(states, tuple) else states
        outputs = outputs if self.rnn.batch_first else outputs.transpose(0, 1)
        result: Tensor = self.head(outputs.mean(1)) + self.state(last[-1])
        return result


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", KINDS)
def test_the_hidden_size_is_cut(kind: str) -> None:
    model = Reader(kind)
    channels = trace(model, SIGNALS)
    assert channels.notes == ()
    assert channels.cut_share > 0.95
    for kept in (keep(channels, 1 / 4), keep(channels, 1 / 2, random(torch.Generator()))):
        assert verify(model, channels, kept) < 1e-9
    kept = keep(channels, 1 / 4)
    small = shrink(model, channels, kept)
    rnn: Any = small.get_submodule("rnn")
    assert (rnn.input_size, rnn.hidden_size) == (3, 2)
    assert rnn.proj_size == (1 if "projected" in kind else 0)
    # As torch builds it at that size, from the same tensors.
    options = {"proj_size": 1} if "projected" in kind else {}
    built = KINDS[kind](3, 2, batch_first=rnn.batch_first, **options)
    built.load_state_dict(rnn.state_dict())
    given = torch.randn(4, 7, 3)
    assert torch.equal(rnn(given)[0], built(given)[0])
    piece = cut(model.state_dict(), view(channels, kept))
    assert all(torch.equal(piece[name], t) for name, t in small.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_masked_states_stay_zero(kind: str) -> None:
    """The oracle: zeros in the dropped rows and columns of the full model's weights."""
    model = Reader(kind).double()
    channels = trace(model, SIGNALS)
    kept = keep(channels, 1 / 2)
    given = torch.randn(4, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = shrink(model, channels, kept)(given)
    drop_entries(model, view(channels, kept))
    assert torch.allclose(got, model(given), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm both ways", "gru"])
@pytest.mark.parametrize("ratio", [1 / 2, 1 / 4])
def test_predicted_bytes_are_those_of_the_meter(kind: str, ratio: float) -> None:
    torch.set_num_threads(1)
    model = Reader(kind)
    channels = trace(model, SIGNALS)
    small = shrink(model, channels, keep(channels, ratio))
    inputs, labels = torch.randn(5, 7, 6), torch.zeros(5, dtype=torch.int64)
    footprint = predict(small, inputs, optimizer=partial(SGD, lr=0.1))
    optimizer = SGD(small.parameters(), lr=0.1)
    with Meter() as meter:
        meter.track(small, inputs, labels)
        for _ in range(2):
            training_step(small, optimizer, inputs, labels)
    assert footprint.peak == meter.peak < predict(model, inputs).peak


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_cut_too(kind: Any) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(6, 10), kind(10, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in F.relu(self.embed(x)).unbind(1):
                state = self.cell(step, state)
            result: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
            return result

    model = Loop()
    channels = trace(model, SIGNALS)
    assert channels.notes == ()
    kept = keep(channels, 1 / 4)
    assert verify(model, channels, kept) < 1e-9
    assert shrink(model, channels, kept).get_submodule("cell").hidden_size == 2
