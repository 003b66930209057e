"""Taking any model apart: in turn where it is a chain, else with its own forward in charge.

`taken_apart` is what everybody asks. Blocks are named or found (`finding`); what each takes and
gives, and whose the other tensors are, is read off one run of the model (`calls`).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError
from sizewise.surgery.anatomy import Anatomy, anatomy, block_paths, paths_of
from sizewise.surgery.calls import Call, Trace, traced
from sizewise.surgery.finding import candidates, once
from sizewise.surgery.in_place import Form, InPlace

TRIED = 4
"""Rows of modules that are tried as blocks, the most likely first."""


def taken_apart(
    model: nn.Module,
    x: Tensor,
    stem: str | Sequence[str] | None = None,
    blocks: str | Sequence[str] | None = None,
    head: str | Sequence[str] | None = None,
) -> Anatomy:
    """Return a model's parts, checked: in turn if it is a chain, else in place.

    Args:
        model: Any module; it is left as it was.
        x: Two samples, (2, ...).
        stem: As for `anatomy`.
        blocks: As for `anatomy`; default: they are found.
        head: As for `anatomy`.

    Raises:
        ModelError: A path is wrong, or the model cannot be taken apart.
    """
    chain = None
    if None not in (stem, blocks, head):
        chain = anatomy(model, stem, blocks, head)
    elif stem is blocks is head is None:
        with suppress(ModelError):  # Nobody said that it has these parts.
            chain = anatomy(model)
    else:
        for part, given in (("stem", stem), ("head", head)):
            paths_of(model, part, given) if given is not None else ()
    if chain is not None and chain.trouble(model, x) is None:
        return chain
    trace = traced(model, x)
    if blocks is not None:
        return _checked(trace, model, x, _named(trace, block_paths(model, blocks)))
    refusals = []
    for found in islice(candidates(trace.root), TRIED):
        try:
            return _checked(trace, model, x, found)
        except ModelError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    raise ModelError(
        f"no blocks were found in {type(model).__name__}, modules in a row through which one "
        "tensor flows; name them in model.anatomy, or choose a method that does not take the model "
        "apart"
    )


def _checked(trace: Trace, model: nn.Module, x: Tensor, blocks: Sequence[Call]) -> InPlace:
    """Return the parts of a model with these blocks; raise ModelError if they are none."""
    stem, between, head = _owners(trace, blocks)
    paths = tuple(call.path for call in blocks)
    parts = InPlace(stem, paths, head, _forms(trace, blocks), between)
    parts.check(model, x)
    return parts


def _named(trace: Trace, paths: Sequence[str]) -> list[Call]:
    """Return the first call of each block, given their paths."""
    called = {id(call.module): call for call in reversed(list(trace.root.every()))}
    modules = {path: trace.model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if id(module) not in called:
            raise ModelError(
                f"{path!r} is not called when {type(trace.model).__name__} runs, so it is no "
                "block; name others in model.anatomy"
            )
    return once([called[id(module)] for module in modules.values()])


def _forms(trace: Trace, blocks: Sequence[Call]) -> tuple[Form, ...]:
    """Return what each block takes and gives."""
    last = {id(call.module): call for call in trace.root.every()}
    found: list[Form] = []
    for number, first in enumerate(blocks):
        # A module that is called again gives what its last call gave.
        call = last[id(first.module)]
        taken, given, after = first.taken, call.given, blocks[number + 1 :][:1]
        shapes = [_sample(leaf) for leaf in call.results]
        inner = None if taken is None else _sample(first.arguments[taken])
        if taken is None or given is None or inner is None or shapes[given] is None:
            raise ModelError(
                f"the block {first.path!r} does not map a tensor of samples to another; name other "
                "blocks in model.anatomy"
            )
        carried = [pair for later in after for pair in _carried(call, later) if pair[0] != given]
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in call.results)
        form = Form(
            *(taken, given, inner, tuple(shapes), call.spec, tuple(carried), constants),
            altered_in=first.arguments[taken]._version != first.versions[taken],
            altered_out=call.results[given]._version != call.after[given],
        )
        if not after and found and found[-1].spec == form.spec:
            form = replace(form, carried=found[-1].carried)
        found.append(form)
    return tuple(found)


def _sample(leaf: Any) -> torch.Size | None:
    samples = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1
    return leaf.shape[1:] if samples and len(leaf) == 2 else None


def _carried(call: Call, later: Call) -> Iterator[tuple[int, int]]:
    """Yield which results are which arguments of the next block, called in the same way."""
    if len(call.arguments) != len(later.arguments):
        return
    for number, result in enumerate(call.results):
        for place, argument in enumerate(later.arguments):
            if isinstance(result, Tensor) and argument is result:
                yield number, place
                break


def _owners(
    trace: Trace, blocks: Sequence[Call]
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return tensors outside of blocks: of the stem, between blocks with their block, of the head.

    Whose a tensor is is said by when it is first used: after how many blocks began.
    """
    starts = [call.start for call in blocks]
    calls: dict[int, int] = {}
    for call in (trace.root, *trace.root.every()):
        calls.setdefault(id(call.module), call.start)
    inside = tuple(f"{call.path}." for call in blocks)
    stem, between, head = list[str](), list[tuple[str, int]](), list[str]()
    for path, module in trace.model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for leaf, tensor in own.items():
            name = f"{path}.{leaf}" if path else leaf
            if tensor is None or name.startswith(inside):
                continue
            # What is never used may be anything, and is best not in anybody's way.
            used = trace.uses.get(id(tensor), calls.get(id(module)))
            begun = len(blocks) if used is None else sum(start <= used for start in starts)
            if begun == 0:
                stem.append(name)
            elif begun == len(blocks):
                head.append(name)
            else:
                between.append((name, begun - 1))
    return tuple(stem), tuple(between), tuple(head)
