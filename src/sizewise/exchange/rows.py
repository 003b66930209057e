"""Rows: tensors of which a device trains some rows only, such as those of the classes it owns.

Which rows, only the device knows, so it says so beside what it sends.
"""

from collections.abc import Mapping, Sequence

import torch

from sizewise.errors import UpdateRefused
from sizewise.exchange.view import Tensors, TensorSlice, View


def with_rows(view: View, rows: Mapping[str, Sequence[int]], tensors: Tensors) -> View:
    """Return a view in which some tensors are narrowed to some of their rows.

    Args:
        view: Where a device's tensors live.
        rows: For some of its names, the rows (dimension 0) that the device sends. They come from
            the device, so they are not to be trusted.
        tensors: The server's tensors.

    Raises:
        UpdateRefused: The rows are not distinct rows of a tensor whose rows the device has all.
    """
    return {**view, **{n: _narrowed(view, n, chosen, tensors) for n, chosen in rows.items()}}


def _narrowed(view: View, name: str, rows: Sequence[int], tensors: Tensors) -> TensorSlice:
    if name not in view:
        raise UpdateRefused(f"rows of {name!r} came, a tensor that was never sent to this device")
    place = view[name]
    shape = tensors[place.name].shape
    index = place.index or (slice(None),) * len(shape)
    count = shape[0] if index and index[0] == slice(None) else 0
    listed = list(rows) if isinstance(rows, list | tuple) else []
    known = {row for row in listed if type(row) is int and 0 <= row < count}
    if not known or len(known) < len(listed):
        raise UpdateRefused(
            f"the rows {rows!r:.99} of {name!r} came, expected distinct rows of {count}"
        )
    return TensorSlice(place.name, (torch.tensor(rows, dtype=torch.int64), *index[1:]))
