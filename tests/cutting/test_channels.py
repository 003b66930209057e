"""Tracing: which tensor dimensions hang together, and what is left whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odd_models import Encoder, Grouped, MobileNet, Odd, UNet
from sizewise.cutting import channels as tracing
from sizewise.cutting.channels import Channels, Group, trace
from sizewise.cutting.selection import keep
from sizewise.cutting.verification import verify
from sizewise.errors import ModelError
from sizewise.models import build

IMAGE = torch.empty(2, 3, 8, 8, device="meta")
VECTOR = torch.empty(2, 6, device="meta")


def sizes(channels: Channels) -> dict[str, int]:
    return {group.name: group.size for group in channels.groups}


def group_of(channels: Channels, tensor: str, dim: int) -> Group:
    (group,) = (g for g in channels.groups if (tensor, dim) in g.members)
    return group


class Lambda(nn.Module):
    """Two linear layers with any function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], hidden: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.between = between
        self.last = nn.LazyLinear(3)
        self(torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


# ---- groups


def test_perceptron_has_a_group_per_hidden_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    channels = trace(model, VECTOR)
    assert channels.groups == (
        Group("0.weight:0", 0, 4, (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))),
        Group("2.weight:0", 1, 5, (("2.weight", 0), ("2.bias", 0), ("4.weight", 1))),
    )
    assert channels.notes == ()


def test_residual_stream_is_one_group_and_inner_widths_are_free() -> None:
    channels = trace(build("preresnet20", classes=5, image=(3, 8, 8)), IMAGE)
    stream = group_of(channels, "stem.conv.weight", 0)
    expected = {("stem.conv.weight", 0), ("blocks.3.projection.weight", 1)}
    for block in range(3):
        expected |= {(f"blocks.{block}.conv1.weight", 1), (f"blocks.{block}.conv2.weight", 0)}
    for block in range(4):
        norm = ("weight", "bias", "running_mean", "running_var")
        expected |= {(f"blocks.{block}.norm1.{tensor}", 0) for tensor in norm}
    assert set(stream.members) == expected | {("blocks.3.conv1.weight", 1)}
    assert sorted(sizes(channels).values()) == [16] * 4 + [32] * 4 + [64] * 4


def test_inputs_classes_kernels_and_counters_are_whole() -> None:
    channels = trace(build("resnet20", classes=5, image=(3, 8, 8)), IMAGE)
    whole = tracing.WHOLE
    assert set(channels.tensors["stem.conv.weight"][1]) == {whole}
    assert set(channels.tensors["head.linear.weight"][0]) == {whole}
    assert set(channels.tensors["head.linear.bias"][0]) == {whole}
    assert set(channels.tensors["stem.conv.weight"][2]) == {whole}
    assert channels.tensors["stem.norm.num_batches_tracked"] == ()


def test_dense_layers_put_new_channels_in_front() -> None:
    channels = trace(build("densenet10", classes=5, image=(3, 8, 8)), IMAGE)
    groups = {group.name: group for group in channels.groups}
    starts = {}
    for group in channels.groups:
        starts[group.name] = sum(g.size for g in channels.groups[: group.index])
    new, old = "blocks.0.conv2.weight:0", "stem.conv.weight:0"
    reader = channels.tensors["blocks.1.conv.weight"][1].tolist()
    assert reader[: groups[new].size] == list(range(starts[new], starts[new] + groups[new].size))
    assert reader[groups[new].size :] == list(range(starts[old], starts[old] + groups[old].size))


def test_flattened_channels_own_all_their_pixels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    columns = trace(model, IMAGE).tensors["2.weight"][1]
    assert columns.tolist() == [channel for channel in range(4) for _ in range(36)]


def test_heads_are_cut_inside_and_stay_in_number() -> None:
    model = build("vit", classes=5, image=(3, 8, 8), args={"dim": 24, "heads": 3, "depth": 1})
    channels = trace(model, IMAGE)
    query = group_of(channels, "blocks.0.attention.query.weight", 0)
    assert query.size == 8
    assert ("blocks.0.attention.key.bias", 0) in query.members
    rows = channels.tensors["blocks.0.attention.query.weight"][0].reshape(3, 8)
    assert (rows == rows[0]).all()
    value = group_of(channels, "blocks.0.attention.value.weight", 0)
    assert ("blocks.0.attention.out.weight", 1) in value.members


def test_depthwise_convolution_follows_its_input() -> None:
    channels = trace(MobileNet(), torch.empty(2, 3, 16, 16))
    hidden = group_of(channels, "blocks.0.depthwise.weight", 0)
    assert hidden.size == 48
    assert {("blocks.0.expand.0.weight", 0), ("blocks.0.excite.weight", 0)} <= set(hidden.members)


def test_grouped_convolution_is_cut_by_groups() -> None:
    channels = trace(Grouped(), IMAGE)
    assert group_of(channels, "grouped.weight", 0).size == 12
    inputs = channels.tensors["reduce.weight"][0].reshape(12, 2)
    outputs = channels.tensors["grouped.weight"][0].reshape(12, 3)
    assert (inputs == outputs[:, :1]).all()
    # The shuffle halves the 32 channels, which are two for each of the stream's 16.
    assert group_of(channels, "multiplied.weight", 0).size == 8


def test_group_norm_is_cut_by_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(4, 12), nn.Conv2d(12, 2, 1))
    assert sizes(trace(model, IMAGE)) == {"0.weight:0": 4}


def test_concatenated_skips_keep_their_places() -> None:
    channels = trace(UNet(), torch.empty(2, 3, 16, 16))
    skip = group_of(channels, "down2.4.weight", 0)
    assert ("merge2.0.weight", 1) in skip.members
    assert ("merge2.0.weight", 1) in group_of(channels, "up2.weight", 1).members


def test_odd_model() -> None:
    channels = trace(Odd(), torch.empty(2, 7, dtype=torch.long))
    assert sizes(channels) == {
        "position:1": 12,
        "gated.weight:0": 20,  # 40 outputs, as value and gate.
        "heads.weight:0": 6,  # In four heads of queries, keys and values.
        "decode.weight:0": 8,  # 32 outputs, as images of 2 by 2.
        "draw.weight:1": 6,
    }
    assert channels.notes == (
        "unused.weight takes no part in the forward pass; it stays whole (also unused.bias)",
    )


def test_tied_tensors_are_cut_alike_and_words_are_whole() -> None:
    channels = trace(Encoder(), torch.empty(2, 7, dtype=torch.long))
    features = group_of(channels, "embed.weight", 1)
    assert ("head.weight", 1) in features.members
    assert set(channels.tensors["embed.weight"][0]) == {tracing.WHOLE}


def test_concatenated_heads_stay_heads() -> None:
    class Cached(nn.Module):
        """Attention that puts a learned token in front of its keys, as caches do."""

        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
            self.first = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            key, query = (
                f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.key, self.query)
            )
            first = self.first.view(1, 2, 1, -1).expand(len(x), -1, -1, -1)
            key = torch.cat([first, key], -2)
            mixed = F.scaled_dot_product_attention(query, key, key)
            return self.out(mixed.transpose(1, 2).flatten(2))

    channels = trace(Cached(), torch.empty(2, 5, 6))
    assert sizes(channels) == {"first:0": 4}
    assert group_of(channels, "query.weight", 0) == group_of(channels, "out.weight", 1)


# ---- what is left whole


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (lambda x: torch.cdist(x, x.flip(0)) @ x, "_cdist_forward in the model is not understood"),
        (lambda x: x.sort(-1).values, "sort in the model is not understood"),
        (lambda x: x[:, :5], "slice in the model cuts channels"),
        (lambda x: x.split([2, 6], 1)[1], "split_with_sizes in the model splits channels"),
        (lambda x: x.softmax(-1), "_softmax in the model mixes channels"),
        (lambda x: x.flip(1), "flip in the model mixes channels"),
        (lambda x: x - x.mean(1, keepdim=True), "mean in the model mixes channels"),
        (lambda x: F.pad(x, (1, 2)), "constant_pad_nd in the model pads channels"),
        (lambda x: x[:, 3:4] * x, "slice in the model cuts channels"),
        (lambda x: x[:, 2].unsqueeze(1), "select in the model picks a channel"),
        (lambda x: F.avg_pool1d(x, 2), "avg_pool2d in the model mixes channels"),
    ],
)
def test_what_is_not_understood_is_left_whole_and_named(
    between: Callable[[Tensor], Tensor], named: str
) -> None:
    channels = trace(Lambda(between), VECTOR)
    assert channels.groups == ()
    assert any(note.startswith(named) for note in channels.notes), channels.notes


def test_note_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1), nn.Linear(4, 3))
    assert trace(model, VECTOR).notes == (
        "_softmax in 1 mixes channels; those it reads stay whole",
    )


def test_sum_with_something_whole_is_whole() -> None:
    model = Lambda(lambda x: x + torch.arange(8.0, device=x.device))
    assert trace(model, VECTOR).groups == ()
    padded = Lambda(lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1))
    assert trace(padded, VECTOR).groups == ()  # The slice is at a fixed place.


def test_numbers_that_learn_are_added_as_they_are() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.one, self.other = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * (self.one + self.other))

    for loose in (False, True):
        assert sizes(trace(Scaled(), VECTOR, loose=loose)) == {"first.weight:0": 8}


def test_writing_channels_into_a_buffer_is_whole() -> None:
    def write(x: Tensor) -> Tensor:
        room = torch.zeros(x.shape[0], 10, device=x.device)
        room[:, :8] = x
        return room

    assert trace(Lambda(write), VECTOR).groups == ()


def test_only_what_is_touched_is_whole() -> None:
    model = nn.Sequential(
        nn.Linear(6, 4), nn.Softmax(-1), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    assert sizes(trace(model, VECTOR)) == {"2.weight:0": 8}


def test_recurrent_layers_are_cut() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 5)
            self.cell = nn.LSTM(5, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(self.embed(x))[0][:, -1])

    channels = trace(Recurrent(), torch.empty(2, 7, 6))
    assert sizes(channels) == {"embed.weight:0": 5, "cell.weight_ih_l0:0": 4}
    assert channels.notes == ()


# ---- sizes that are stored


class Rows(nn.Module):
    """Splits what its layer gives into rows of a stored size."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.wide, self.size, self.narrow = nn.Linear(8, 12), size, nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.wide(x).view(len(x), 12 // self.size, self.size)
        return x + self.narrow(rows.relu().flatten(1))


def test_what_stores_sizes_is_left_whole_inside() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Rows(), nn.ReLU(), Rows(3), nn.Linear(8, 3))
    channels = trace(model, VECTOR)
    assert sizes(channels) == {"0.weight:0": 8}
    assert channels.notes == (
        "1 uses sizes that it stored; the channels inside it stay whole (also 3)",
    )
    # Both weights of 96 entries shrink along the stream, the biases of 12 not.
    assert channels.cut_share == 1 - (2 * 12 + 3) / sum(p.numel() for p in model.parameters())
    assert verify(model, channels, keep(channels, 1 / 4)) < 1e-12


def test_what_a_stored_size_reads_is_left_whole_if_the_inside_does_not_do() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:, :4].relu(), x[:, 4:8]], 1).reshape(-1, 2, 4).flatten(1)

    model = nn.Sequential(nn.Linear(6, 8), Halves(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3))
    assert sizes(trace(model, VECTOR)) == {"2.weight:0": 10}


def test_in_a_model_without_parts_what_is_near_the_stored_size_is_left_whole() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 10)
            self.head = nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.first(x).view(-1, 3, 4).relu()
            return self.head(self.second(rows.flatten(1)).relu())

    model = Flat()
    channels = trace(model, VECTOR)
    assert sizes(channels) == {"second.weight:0": 10}
    (note,) = channels.notes
    assert "gives channels that are counted by a stored size; they stay whole" in note
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12


def test_a_forward_that_does_something_else_for_some_token_ids_is_refused() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids).mean(1)
            return self.head(x.relu() if (ids == 7).any() else x)

    with pytest.raises(ModelError, match="cannot be traced: it looks at numbers"):
        trace(Padded(), torch.empty(2, 5, dtype=torch.int64, device="meta"))


# ---- being a good guest


def test_model_is_left_as_it_was() -> None:
    model = build("cnn", classes=5, image=(3, 8, 8)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(model, IMAGE)
    assert model.training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_trace_is_the_same_every_time() -> None:
    model = build("densenet10", classes=5, image=(3, 8, 8))
    assert trace(model, IMAGE).groups == trace(model, torch.empty(4, 3, 8, 8)).groups


def test_error_says_what_is_wrong() -> None:
    with pytest.raises(ModelError, match=r"cannot be traced on inputs of shape \(2, 6\)"):
        trace(build("cnn", classes=5, image=(3, 8, 8)), VECTOR)

    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> object:
            return object()

    with pytest.raises(ModelError, match="returns the logits"):
        trace(Opaque(), VECTOR)


def test_mask_refuses_what_does_not_fit() -> None:
    channels = trace(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), VECTOR)
    with pytest.raises(ModelError, match=r"'0\.weight:0' is missing"):
        channels.mask({})
    with pytest.raises(ModelError, match="channels 0 to 3"):
        channels.mask({"0.weight:0": torch.tensor([4])})
    assert channels.mask({"0.weight:0": torch.tensor([0, 2])}).tolist() == [1, 0, 1, 0, 1]


# ---- how much is cut


def test_cut_share_counts_parameters_that_shrink() -> None:
    # Weights 6x4 and 4x3 and the first bias lie in the hidden layer; the last bias (3) does not.
    channels = trace(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), VECTOR)
    assert channels.cut_share == (24 + 4 + 4 + 4 + 12) / (24 + 4 + 4 + 4 + 12 + 3)
    whole = trace(nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1), nn.Linear(4, 3)), VECTOR)
    assert whole.cut_share == 0


def test_cut_share_counts_tied_tensors_once() -> None:
    model = Encoder()
    channels = trace(model, torch.empty(2, 7, dtype=torch.long))
    whole = model.head.bias.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert channels.cut_share == (total - whole) / total


def test_cut_share_of_a_model_without_parameters_is_zero() -> None:
    assert trace(nn.Flatten(), VECTOR).cut_share == 0
