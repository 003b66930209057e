"""Finding the blocks of any model: repeated modules through which one tensor flows.

The model runs once on two samples, and every call of a module is noted: who called it, what came
in, what went out. A module whose result is that of a chain of its own parts is a container, and is
looked into; all others are single pieces. So a stage is taken apart and a residual block is not, in
which something goes around its layers. Of the pieces in a row, each made from what the one before
gave, the longest row that begins and ends with a kind of module that is there more than once are
the blocks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from sizewise.surgery.calls import Call

# ---- which modules are looked into


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _layers(call: Call) -> list[Call]:
    """Return the calls that a call made itself, of modules with parameters."""
    return [inner for inner in call.calls if _learns(inner.module)]


def _flat(call: Call) -> bool:
    """Return whether all that a call made itself are plain layers."""
    return not any(_layers(inner) for inner in call.calls)


def _is_chain(call: Call) -> bool:
    """Return whether what a module gives is what the last of a chain of its parts gives.

    Nothing may go around: each tensor on the way goes to one module with parameters at most, and
    nobody changes it between two of them.
    """
    if call.taken is None or call.given is None:
        return False
    tensor, version = call.arguments[call.taken], call.versions[call.taken]
    goal, changed, waiting = call.results[call.given], call.after[call.given], list(call.calls)
    while tensor is not goal or version != changed:
        users = [inner for inner in waiting if _takes(inner, tensor, version)]
        chosen = [inner for inner in users if _learns(inner.module)] or users[:1]
        if len(chosen) != 1:
            return False
        (step,) = chosen
        waiting = [inner for inner in waiting if inner.start > step.start]
        if step.given is None:
            return False
        tensor, version = step.results[step.given], step.after[step.given]
    return True


def _takes(call: Call, tensor: Tensor, version: int) -> bool:
    pairs = zip(call.arguments, call.versions, strict=True)
    return any(leaf is tensor and seen == version for leaf, seen in pairs)


def _pieces(root: Call, into_flat: bool) -> list[Call]:
    """Return the calls that a model consists of, in order, once containers are looked into.

    Args:
        root: The call of the model.
        into_flat: Also look into modules of plain layers.
    """
    every = list(root.every())
    kinds = Counter(type(module) for module in {call.module: None for call in every})
    # One block of many may have nothing that goes around it; it is still a block.
    mixed = {
        type(call.module)
        for call in every
        if _layers(call) and not isinstance(call.module, nn.Sequential) and not _is_chain(call)
    }

    first = next((call.start for call in every if _learns(call.module) and not _layers(call)), 0)

    def is_open(call: Call) -> bool:
        layers, kind = _layers(call), type(call.module)
        if not layers or (_flat(call) and not into_flat):
            return False
        if kinds[kind] == 1 and (call.start < first or call.taken is None):
            return True  # What begins before any layer runs is the model in its wrapping.
        composed = sum(bool(_layers(inner)) for inner in layers)
        mostly = into_flat or 3 * composed >= len(layers)
        return mostly and kind not in mixed and _is_chain(call)

    def within(call: Call) -> Iterator[Call]:
        for inner in _layers(call):
            if is_open(inner):
                yield from within(inner)
            else:
                yield inner

    return list(within(root))


# ---- which of them are blocks


def _rows(pieces: Sequence[Call]) -> list[list[Call]]:
    """Return pieces in rows: each is made from what the one before it gave."""
    rows: list[list[Call]] = []
    for piece in pieces:
        if piece.taken is None or piece.given is None:
            continue
        made = [row for row in rows if _follows(piece, row[-1])]
        if made:
            # Of several, the row that was added to last.
            row = max(made, key=lambda row: row[-1].start)
            row.append(piece)
        else:
            rows.append([piece])
    return rows


def _follows(later: Call, earlier: Call) -> bool:
    """Return whether what goes into a call depends on what another gave."""
    tensor = later.arguments[later.taken or 0]
    if earlier.given is not None and tensor is earlier.results[earlier.given]:
        return True
    seen, waiting = set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is earlier.node and node is not None:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False


def candidates(root: Call) -> Iterator[list[Call]]:
    """Yield what may be the blocks of a model, the most likely first: one call for each."""
    yield from _repeated(_pieces(root, into_flat=False))
    # Something that is no chain may hold one.
    inner = [found for call in root.every() for found in _repeated(_layers(call))]
    yield from sorted(inner, key=len, reverse=True)
    # Plain layers, the first and the last of which are stem and head.
    layers = _pieces(root, into_flat=True)
    rows = [row for row in _rows(layers) if len(row) > 2]
    yield from (once(row[1:-1]) for row in sorted(rows, key=len, reverse=True)[:1])


def _repeated(pieces: Sequence[Call]) -> list[list[Call]]:
    """Return rows of pieces of layers that begin and end with a kind that is there again.

    The longest comes first, of several the last. Kinds that hold more than plain layers count
    before those that do not, such as the convolutions of a stem.
    """
    found = []
    for row in _rows([piece for piece in pieces if _layers(piece)]):
        kinds = Counter(type(p.module) for p in row if type(p.module) is not nn.Sequential)
        repeated = {kind for kind, count in kinds.items() if count > 1}
        deep = {type(piece.module) for piece in row if not _flat(piece)} & repeated
        places = [n for n, piece in enumerate(row) if type(piece.module) in (deep or repeated)]
        if places:
            found.append(row[places[0] : places[-1] + 1])
    found.reverse()
    return [once(row) for row in sorted(found, key=len, reverse=True)]


def once(calls: Sequence[Call]) -> list[Call]:
    """Return calls without those of a module that was called before: it is one block."""
    found: dict[int, Call] = {}
    for call in calls:
        found.setdefault(id(call.module), call)
    return list(found.values())
