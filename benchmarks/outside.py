"""Modules from outside, cut by width: right, left whole and said, or refused. Never wrong.

The environment (once; timm wants torchvision for its data only, which is stubbed):

    python3.11 -m venv /tmp/outside
    /tmp/outside/bin/pip install torch==2.13.0
    /tmp/outside/bin/pip install --no-deps timm transformers
    /tmp/outside/bin/pip install huggingface_hub safetensors pyyaml tokenizers regex requests tqdm \
        packaging numpy pillow typer rich tomli_w
    PYTHONPATH=src /tmp/outside/bin/python benchmarks/outside.py [NAME...] > benchmarks/outside.md

Without it, `--smoke` and the names of oddities work, which need nothing but torch.

Takes about five minutes of two cores. Exits 1 if a module comes out wrong, or ends in anything but
one sentence of sizewise.

Every module is traced, cut to a random half and to the first quarter of each group of channels, and
checked by the library (`cutting.verify`). Whatever the library lets pass is judged here again, by
code that shares nothing with it: in float64, with other random weights, in eval and in training
mode, the narrow model must give the outputs of the full model in which every dropped entry is next
to nothing (1e-30). It must also train: one step in float32. Four differences are meant, and taken
out of the comparison:

- A layer norm has the statistics of the channels that exist. The full model's gets those of the
  channels whose weight is not silent or, without weights, whose values are not; there must be as
  many as the narrow one has.
- Likewise the mean of squares in an RMS norm: over the channels in which there is something, and
  there must be as many as the narrow one has.
- Numbers that a forward works out from its sizes, such as the root of a head's size, are those of
  the narrow model: its factors of multiplications and divisions are used in the full one too,
  also where they are tensors of one number that neither weights nor inputs went into.
- Attention that is not told its scale gets 1, in both.

Dropout is off. Outputs may differ by 1e-8 of the largest one.
"""

import copy
import importlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import common
from outside_modules import Module, named
from sizewise.cutting import selection, shrinking, verification
from sizewise.cutting.channels import Channels, Kept, trace
from sizewise.errors import SizewiseError

WORKERS = 2
TOLERANCE = 1e-8

SILENT = 1e-30
"""What dropped entries are set to: not 0, so that a weight can be divided by its norm."""


@dataclass(frozen=True)
class Verdict:
    """What became of a module.

    Attributes:
        outcome: right, whole, refused; or WRONG, TRACEBACK, not built.
        share: Of the parameters that shrink with the width.
        notes: How many parts are said to stay whole.
        said: The sentence, or what is wrong.
    """

    outcome: str
    share: float | None = None
    notes: int = 0
    said: str = ""


class Mismatch(Exception):
    """The narrow model does other things than the full one."""


# ---- the judge


def judge(model: nn.Module, channels: Channels, kept: Kept, module: Module) -> float:
    """Return the largest difference between the narrow model and the masked one, in both modes."""
    generator = torch.Generator().manual_seed(1234)
    full = copied(model).double()
    randomise(full, generator)
    narrow = quiet(shrinking.shrink(full, channels, kept))
    silence(quiet(full), channels, kept)
    inputs = module.inputs(generator)
    worst = 0.0
    for training in (False, True):
        full.train(training)
        narrow.train(training)
        for layer in (*full.modules(), *narrow.modules()):
            if isinstance(layer, nn.RNNBase):
                layer.eval()
        with torch.no_grad(), plain_attention():
            notes = Notes(narrow, inputs)
            with notes:
                got = narrow(inputs)
            reference = AsNarrow(full, inputs, notes.seen)
            with reference:
                expected = full(inputs)
            reference.finish()
        worst = max(worst, difference(got, expected))
    return worst


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model, also of one that keeps tensors with a history as attributes."""
    memo = {
        id(value): value.detach().clone()
        for layer in model.modules()
        if not isinstance(layer, torch.jit.ScriptModule)
        for value in vars(layer).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter and statistic a random value that is not 0."""
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        scale = (tensor[0].numel() if tensor.ndim > 1 else 4) ** -0.5
        tensor.copy_(noise * scale + (1.0 if tensor.ndim == 1 and "bias" not in name else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            noise = torch.rand(buffer.shape, dtype=buffer.dtype, generator=generator)
            buffer.copy_(noise + 0.5 if name.endswith("var") else noise - 0.5)


@torch.no_grad()
def silence(model: nn.Module, channels: Channels, kept: Kept) -> None:
    """Set every entry that the narrow model lacks to next to nothing, a variance to 1."""
    mask = torch.from_numpy(channels.mask(kept))
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        held = torch.ones(tensor.shape, dtype=torch.bool)
        for dim, ids in enumerate(channels.tensors[name]):
            along = [1] * tensor.ndim
            along[dim] = -1
            held &= mask[torch.from_numpy(ids)].view(along)
        tensor.masked_fill_(~held, 1.0 if name.endswith("running_var") else SILENT)


def quiet(model: nn.Module) -> nn.Module:
    """Turn everything off that draws random numbers in training."""
    for layer in model.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
        for name in ("attn_drop", "proj_drop", "dropout_p", "drop_rate", "attn_dropout_p"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    return model


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention that is not told its scale have 1, and take its path in Python."""
    original, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()

    def unscaled(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("scale") is None:
            kwargs["scale"] = 1.0
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = unscaled
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
        torch.backends.mha.set_fastpath_enabled(fast)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what has to be accounted for: factors, layer norms, and means over one dimension."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Tensors that weights or inputs went into.
        self._live = WeakTensorKeyDictionary(
            dict.fromkeys([*model.parameters(), *model.buffers(), inputs], True)
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func._schema.name).partition("::")[2].rstrip("_")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind, value = "", None
        if name in ("mul", "div") and self._constant(args[1]):
            kind, value = "factor", args[1]
        elif name == "native_layer_norm":
            kind, value = "norm", list(args[1])
        elif name == "mean" and len(args) > 1 and len(args[1] or ()) == 1:
            kind, value = "mean", args[0].shape[args[1][0]]
        out = self.run(func, args, kwargs or {}, kind, value)
        if any(tensor in self._live for tensor in given):
            results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self._live.update(dict.fromkeys(results, True))
        return out

    def _constant(self, value: object) -> bool:
        if isinstance(value, Tensor):
            return value.ndim == 0 and value not in self._live
        return isinstance(value, int | float)

    def run(self, func: Any, args: Any, kwargs: Any, kind: str, value: Any) -> object:
        """Return what an operation returns; `kind` and `value` say what is special in it."""
        raise NotImplementedError


class Notes(Watch):  # type: ignore[no-untyped-call]
    """Notes the factors and the sizes of norms of the narrow model, in order."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__(model, inputs)
        self.seen: list[tuple[str, Any]] = []

    def run(self, func: Any, args: Any, kwargs: Any, kind: str, value: Any) -> object:
        """Note what is special."""
        if kind:
            self.seen.append((kind, value))
        return func(*args, **kwargs)


class AsNarrow(Watch):  # type: ignore[no-untyped-call]
    """Gives the full model the narrow one's factors, and its norms the kept channels."""

    def __init__(self, model: nn.Module, inputs: Tensor, seen: list[tuple[str, Any]]) -> None:
        super().__init__(model, inputs)
        self._seen = iter(seen)

    def finish(self) -> None:
        """Raise Mismatch if the narrow model did more than this one."""
        if next(self._seen, None) is not None:
            raise Mismatch("the narrow model runs more operations than the full one")

    def run(self, func: Any, args: Any, kwargs: Any, kind: str, value: Any) -> object:
        """Run an operation as the narrow model did."""
        if not kind:
            return func(*args, **kwargs)
        noted, narrow = next(self._seen, ("", ()))
        if noted != kind:
            raise Mismatch("the narrow model runs other operations than the full one")
        if kind == "factor":
            return func(args[0], narrow, *args[2:], **kwargs)
        if narrow == value:
            return func(*args, **kwargs)
        if kind == "mean":
            return func(self._shown(args[0], args[1][0], narrow), *args[1:], **kwargs)
        return self._norm(func, args, narrow)

    def _shown(self, squares: Tensor, dim: int, size: Any) -> Tensor:
        """Return the entries along a dimension in which there is something."""
        if (squares < 0).any():
            raise Mismatch("a mean over channels was cut that is not one of squares")
        most = squares.transpose(0, dim).flatten(1).amax(1)
        at = (most > TOLERANCE**2).nonzero().flatten()
        if len(at) != size:
            raise Mismatch(f"a mean of squares sees {len(at)} channels, the narrow one {size}")
        return squares.index_select(dim, at)

    def _norm(self, func: Any, args: Any, size: Sequence[int]) -> object:
        x, shape, weight, bias, eps = args
        if len(shape) != 1:
            raise Mismatch("a layer norm over several dimensions was cut")
        shown = x.flatten(0, -2).abs().amax(0) if weight is None else weight
        at = (shown.abs() > TOLERANCE).nonzero().flatten()
        if len(at) != size[0]:
            raise Mismatch(f"a layer norm sees {len(at)} channels, the narrow one {size[0]}")
        own = [None if t is None else t[at] for t in (weight, bias)]
        out, mean, rstd = func(x[..., at], size, *own, eps)
        return torch.zeros_like(x).index_copy_(-1, at, out), mean, rstd


def difference(got: object, expected: object) -> float:
    """Return the largest difference, relative to the largest expected value."""
    pairs = list(zip(tree_leaves(got), tree_leaves(expected), strict=True))
    worst = 0.0
    for one, other in pairs:
        if isinstance(other, Tensor):
            if one.shape != other.shape:
                raise Mismatch(f"the narrow model gives {tuple(one.shape)}")
            error = float((one - other).abs().max() / other.abs().max())
            worst = max(worst, error if error == error else float("inf"))
    return worst


def trains(model: nn.Module, channels: Channels, kept: Kept, module: Module) -> None:
    """Take one training step of the narrow model, in float32."""
    narrow = shrinking.shrink(model, channels, kept).train()
    inputs = module.inputs(torch.Generator().manual_seed(1))
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    outputs = [leaf for leaf in tree_leaves(narrow(inputs)) if isinstance(leaf, Tensor)]
    torch.stack([output.square().mean() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]


# ---- the table


def verdict(module: Module) -> Verdict:
    """Cut a module, and say what became of it."""
    torch.manual_seed(0)
    try:
        model = module.build()
    except Exception as error:
        return Verdict("not built", said=f"{type(error).__name__}: {error}")
    channels, share = None, None
    try:
        channels = trace(model, module.inputs(torch.Generator()).float()[:2].to(_kind(module)))
        share = channels.cut_share
        if not share:
            return Verdict("whole", 0.0, len(channels.notes), "; ".join(channels.notes[:1]))
        ways = [
            selection.keep(channels, 0.5, selection.random(torch.Generator().manual_seed(3))),
            selection.keep(channels, 0.25),
        ]
        for kept in ways:
            shrinking.shrink(model, channels, kept)
            verification.verify(model, channels, kept)
    except SizewiseError as error:
        return Verdict("refused", share, len(channels.notes) if channels else 0, str(error))
    except Exception as error:
        return Verdict("TRACEBACK", share, 0, f"{type(error).__name__}: {error}")
    try:
        for kept in ways:
            apart = judge(model, channels, kept, module)
            if not apart <= TOLERANCE:
                return Verdict("WRONG", share, len(channels.notes), f"off by {apart:.1g}")
            trains(model, channels, kept, module)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return Verdict("WRONG", share, len(channels.notes), words)
    return Verdict("right", share, len(channels.notes), "; ".join(channels.notes[:1]))


def _kind(module: Module) -> torch.dtype:
    return torch.int64 if len(module.shape) == 1 else torch.float32


def main() -> int:
    """Print the table; return 1 if something is wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules or origins; default: all")
    given = parser.parse_args()
    modules = named(
        ["CountedHeads", "ConcatBeforeGroups", "Scripted"] if given.smoke else given.names
    )
    # Forked, so that the modules need not travel: a task is a module's number.
    with get_context("fork").Pool(WORKERS, _take, (modules,)) as pool:
        found = pool.map(_timed, range(len(modules)), chunksize=1)
    print(page(list(zip(modules, found, strict=True))))
    return int(any(one.outcome not in ("right", "whole", "refused") for one in found))


_taken: list[Module] = []


def _take(modules: list[Module]) -> None:
    _taken.extend(modules)


def _timed(number: int) -> Verdict:
    start = time.process_time()
    found = verdict(_taken[number])
    seconds = time.process_time() - start
    print(f"{seconds:5.1f} s {_taken[number].name}: {found}", file=sys.stderr, flush=True)
    return found


def page(rows: list[tuple[Module, Verdict]]) -> str:
    """Return the table and what it adds up to, in Markdown."""
    counts = {
        outcome: sum(found.outcome == outcome for _, found in rows)
        for outcome in ("right", "whole", "refused", "WRONG", "TRACEBACK")
    }
    origins = [origin for origin in ("timm", "transformers") if _has(rows, origin)]
    packages = map(importlib.import_module, ("torch", *origins))
    versions = ", ".join(f"{package.__name__} {package.__version__}" for package in packages)
    lines = [
        "# Modules from outside, cut by width",
        "",
        "Written by `benchmarks/outside.py`, which says how each is judged. *Shrinks* is the share",
        "of the parameters that becomes smaller with the width, *notes* how many parts the library",
        "says it leaves whole, followed by the first of them or by why it refuses the module.",
        "",
        f"{len(rows)} modules ({versions}): {counts['right']} right, {counts['whole']} left whole "
        f"and said, {counts['refused']} refused, {counts['WRONG']} wrong, "
        f"{counts['TRACEBACK']} tracebacks.",
        "",
        "| from | module | outcome | shrinks | notes | said |",
        "|---|---|---|---|---|---|",
    ]
    for module, found in rows:
        share = "" if found.share is None else f"{found.share:.0%}"
        said = found.said.replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {module.origin} | {module.name} | {found.outcome} | {share} | {found.notes or ''} "
            f"| {said} |"
        )
    return "\n".join(lines)


def _has(rows: list[tuple[Module, Verdict]], origin: str) -> bool:
    return any(module.origin == origin for module, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
