import torch

from sizewise.surgery.links import channels_last, skip_link


def test_tokens_are_sampled_and_their_channels_padded() -> None:
    x = torch.arange(1.0, 13.0).reshape(1, 6, 2)
    out = skip_link(x, (3, 4))
    expected = torch.zeros(1, 3, 4)
    expected[:, :, 1:3] = x[:, ::2]
    assert torch.equal(out, expected)


def test_missing_tokens_are_zero_and_follow() -> None:
    x = torch.randn(2, 3, 4)
    out = skip_link(x, (4, 4))
    assert torch.equal(out[:, :3], x)
    assert not out[:, 3:].any()


def test_maps_with_channels_last_are_those_with_channels_first() -> None:
    x = torch.randn(2, 8, 8, 6)
    assert channels_last((8, 8, 6), (4, 4, 12))
    assert not channels_last((6, 8, 8), (12, 4, 4))
    expected = skip_link(x.movedim(-1, 1), (12, 4, 4)).movedim(1, -1)
    assert torch.equal(skip_link(x, (4, 4, 12)), expected)


def test_what_has_other_dimensions_is_a_row_of_numbers() -> None:
    x = torch.arange(1.0, 5.0).reshape(1, 2, 2)
    assert torch.equal(skip_link(x, (3,)), torch.tensor([[1.0, 2.0, 3.0]]))
    assert torch.equal(skip_link(x, (1, 2, 3)), torch.tensor([[[[0.0, 1, 2], [3, 4, 0]]]]))
