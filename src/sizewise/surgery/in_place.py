"""Taking a model apart while its own forward stays in charge.

Most models do something between their blocks: they add a class token, make a mask once for all
layers, keep a second tensor beside the first. Their blocks cannot be run one after another from
outside. So the model runs as it always does, and each block is asked on its way:

    inputs -> forward of the model: ... block 0 ... block 1 ... block 2 ... -> logits
                                         runs       is passed    hands out what it made,
                                                    around       and the model ends here

`Form` is what a block takes and gives. `steer` lets blocks of a model obey a `Steering`; `Passed`
and `Entrance` stand in the place of blocks that a device does not hold.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sizewise.errors import ModelError
from sizewise.surgery.anatomy import Anatomy, Part
from sizewise.surgery.links import skip_link
from sizewise.torch_tools.remaking import clone, remade


@dataclass(frozen=True)
class Form:
    """What a block takes and gives, as the leaves of nested arguments and results.

    Attributes:
        taken: The number of the hidden tensor among the arguments.
        given: And among the results.
        inner: Shape of one sample's hidden tensor as it comes in.
        results: Shapes of one sample of all results; None is no tensor of samples.
        spec: How results are nested.
        carried: Results that the block passes on beside the hidden tensor, such as a mask or a
            bias, each with the argument that it is in the next block.
        constants: What results are that are no tensors, such as sizes.
        altered_in: Whether somebody changes the hidden tensor in place after it came in.
        altered_out: Whether somebody does so after it went out.
    """

    taken: int
    given: int
    inner: torch.Size
    results: tuple[torch.Size | None, ...]
    spec: TreeSpec
    carried: tuple[tuple[int, int], ...] = ()
    constants: tuple[Any, ...] = ()
    altered_in: bool = False
    altered_out: bool = False

    @property
    def outer(self) -> torch.Size:
        """Shape of one sample's hidden tensor as it goes out."""
        return self.results[self.given] or torch.Size()

    @property
    def keeps_shape(self) -> bool:
        """Whether the hidden tensor goes out in the shape in which it comes in."""
        return self.inner == self.results[self.given]

    def __deepcopy__(self, memo: Any) -> "Form":
        """Return itself: nothing in it ever changes, and torch's specs complain of being copied."""
        return self

    def hidden_in(self, args: Any, kwargs: Any) -> Tensor:
        """Return the hidden tensor (B, ...) among the arguments of a call, to keep."""
        found: Tensor = tree_flatten((args, kwargs))[0][self.taken]
        return found.clone() if self.altered_in else found

    def hidden_out(self, result: Any) -> Tensor:
        """Return the hidden tensor (B, ...) among the results of a call, to keep."""
        found: Tensor = tree_flatten(result)[0][self.given]
        return found.clone() if self.altered_out else found

    def with_hidden(self, result: Any, hidden: Tensor) -> Any:
        """Return the results of a call with another hidden tensor among them."""
        leaves, spec = tree_flatten(result)
        leaves[self.given] = hidden
        return tree_unflatten(leaves, spec)

    @property
    def unfitted(self) -> "Form":
        """The same of a block that keeps shapes, at any width."""
        return replace(self, results=(None,) * len(self.results))

    def around(self, args: Any, kwargs: Any, hidden: Tensor | None = None) -> Any:
        """Return what the block would give if it did nothing, or gave this hidden tensor."""
        leaves = tree_flatten((args, kwargs))[0]
        made = list(self.constants)
        for result, argument in ((self.given, self.taken), *self.carried):
            shape, value = self.results[result], leaves[argument]
            fits = isinstance(value, Tensor) and shape is not None
            made[result] = skip_link(value, shape or ()) if fits else value
        if hidden is not None:
            made[self.given] = hidden
        if self.altered_out:  # In place of a tensor of the block's own, which that was free to do.
            made[self.given] = made[self.given].clone()
        return tree_unflatten(made, self.spec)


class Passed(nn.Module):
    """In the place of a block that is not there: what comes in goes out, as the block would.

    Models read settings off their blocks, so it has the plain attributes of the block.
    """

    def __init__(self, form: Form, block: nn.Module) -> None:
        super().__init__()
        self.form = form
        for name, value in vars(block).items():
            if isinstance(value, bool | int | float | str | tuple) and name not in vars(self):
                vars(self)[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden tensor, and what is carried beside it, as the block's results."""
        return self.form.around(args, kwargs)


class Entrance(Passed):
    """In the place of the last block: whatever comes in, a hidden tensor from elsewhere goes out.

    Attributes:
        hidden: That tensor, while the model runs.
        learns: Whether what follows may learn.
    """

    def __init__(self, form: Form, block: nn.Module) -> None:
        super().__init__(form, block)
        self.hidden: Tensor | None = None
        self.learns = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden tensor as the block's results."""
        # What ran up to here is not used, so nobody goes back there; see `enter`.
        torch.set_grad_enabled(self.learns)
        return self.form.around(args, kwargs, self.hidden)


class Steering:
    """What blocks of a model do.

    Attributes:
        runs: The numbers of the blocks that run; None is all. Others are passed around.
        found: While a model runs, by the number of blocks before it, the hidden tensor.
    """

    def __init__(self) -> None:
        self.runs: Collection[int] | None = None
        self.found: dict[int, Tensor] | None = None
        self._stops: Collection[int] = ()
        self._end: int | None = None

    def run(self, model: nn.Module, x: Tensor, runs: Collection[int] | None = None) -> Tensor:
        """Return the logits (B, classes) of a model in which only some blocks run.

        What was asked for stays in force: blocks may run again in the backward pass.
        """
        self.runs = runs
        logits: Tensor = model(x)
        return logits

    def hidden(
        self,
        model: nn.Module,
        x: Tensor,
        stops: Collection[int],
        end: int | None = None,
        runs: Collection[int] | None = None,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Return hidden tensors after some numbers of blocks, and the logits.

        With an end, the model is left before that block, and there are no logits.
        """
        self.runs, self.found, self._stops, self._end = runs, {}, stops, end
        found, logits = self.found, None
        try:
            logits = model(x)
        except _Left:
            pass
        finally:
            self.found, self._end = None, None
        return found, logits

    def call(self, number: int, form: Form, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a block gives in one call."""
        found = self.found
        if found is not None and number == 0 and 0 in self._stops:
            found.setdefault(0, form.hidden_in(args, kwargs))  # A block may be called again.
        if found is not None and self._end == number:
            raise _Left
        if self.runs is None or number in self.runs:
            result = run(*args, **kwargs)
        else:
            result = form.around(args, kwargs)
        if found is not None and number + 1 in self._stops:
            found[number + 1] = form.hidden_out(result)
        return result


class _Left(Exception):
    """Ends a forward pass: what it is for was found."""


class _Steered:
    """The forward of a block that obeys a steering.

    An object, not a function: a copy of the model has to refer to the copied block.
    """

    def __init__(self, steering: Steering, number: int, form: Form, run: Any) -> None:
        self.steering, self.number, self.form, self.run = steering, number, form, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.steering.call(self.number, self.form, self.run, args, kwargs)


@dataclass(frozen=True)
class InPlace(Anatomy):
    """Where a model's parts are if only its own forward can run them.

    Stem and head are tensors that are used before the first block and after the last.

    Attributes:
        forms: What each block takes and gives.
        between: Tensors that are used between blocks, each with the block before it.
    """

    forms: tuple[Form, ...] = ()
    between: tuple[tuple[str, int], ...] = ()

    def part_of(self, tensor_name: str) -> Part:
        """Return the part that owns a parameter or buffer: "stem", a block's index, or "head"."""
        found = dict(self.between).get(tensor_name)
        return super().part_of(tensor_name) if found is None else found

    def owned(self, block: int) -> tuple[str, ...]:
        """Return a block's path, and the tensors outside of it that belong to it."""
        return (self.blocks[block], *(name for name, owner in self.between if owner == block))

    def in_turn(self, what: str) -> Anatomy:
        """Raise ModelError: the parts cannot be run one after another."""
        raise ModelError(
            f"{what} runs a model's stem, blocks and head one after another, and the forward of "
            "this model does something between them; move that into modules, or do without"
        )

    def run_stem(self, model: nn.Module, x: Tensor) -> Tensor:
        """Raise ModelError."""
        return self.in_turn("this method").run_stem(model, x)

    def run_blocks(
        self, model: nn.Module, x: Tensor, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Raise ModelError."""
        return self.in_turn("this method").run_blocks(model, x, start, stop)

    def run_head(self, model: nn.Module, x: Tensor) -> Tensor:
        """Raise ModelError."""
        return self.in_turn("this method").run_head(model, x)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of one sample's hidden tensor before the first block and after each."""
        return (self.forms[0].inner, *(form.outer for form in self.forms))

    def steer(self, model: nn.Module) -> Steering:
        """Let a model's blocks obey a steering, at first to run; changes the model in place.

        Tensors keep their names.
        """
        steering = Steering()
        for number, (path, form) in enumerate(zip(self.blocks, self.forms, strict=True)):
            block = model.get_submodule(path)
            vars(block)["forward"] = _Steered(steering, number, form, block.forward)
        return steering

    def enterable(self, model: nn.Module) -> Entrance:
        """Replace a model's blocks so that a hidden tensor can enter it after the last."""
        for number in range(len(self.blocks) - 1):
            self.leave_out(model, number)
        entrance = Entrance(self.forms[-1], model.get_submodule(self.blocks[-1]))
        model.set_submodule(self.blocks[-1], entrance)
        return entrance

    def leave_out(self, model: nn.Module, number: int) -> None:
        """Take a block out of a model, in place."""
        path = self.blocks[number]
        model.set_submodule(path, Passed(self.forms[number], model.get_submodule(path)))

    def check(self, model: nn.Module, x: Tensor) -> None:
        """Make sure that a model can be taken apart in place; it is left as it was.

        Steered, it gives what it gives; it runs without its blocks; and its logits depend on the
        blocks only by the hidden tensor after the last.

        Raises:
            ModelError: It is not so.
        """
        name, count = type(model).__name__, len(self.blocks)
        model = remade(model, clone).eval()
        beheaded = remade(model, clone)
        with torch.no_grad():
            expected = model(x)
            steering = self.steer(model)
            try:
                found, logits = steering.hidden(model, x, {count})
                same = logits is not None and torch.equal(logits, expected)
                entered = enter(beheaded, self.enterable(beheaded), found[count], x)
                without = steering.run(model, x, runs={0})
            except Exception as error:  # a model of the user's may raise anything
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise ModelError(
                    f"{name} cannot run without some of its blocks, {self.blocks[0]} to "
                    f"{self.blocks[-1]} ({reason}); name others in model.anatomy"
                ) from error
        if not same or without.shape != expected.shape or not torch.equal(entered, expected):
            raise ModelError(
                f"what {name} makes of its blocks, {self.blocks[0]} to {self.blocks[-1]}, is more "
                "than the last one gives; name others in model.anatomy, or choose a method that "
                "does not take the model apart"
            )


def enter(model: nn.Module, entrance: Entrance, hidden: Tensor, x: Tensor) -> Tensor:
    """Return the logits (B, classes) of a model whose last block gives a hidden tensor (B, ...).

    Everything before it still runs on the inputs, for masks and the like.
    """
    entrance.hidden, entrance.learns = hidden, torch.is_grad_enabled()
    try:
        with torch.no_grad():  # Until the entrance; then as it is outside.
            logits: Tensor = model(x)
    finally:
        entrance.hidden = None
    return logits


def holders(model: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """Return the module that holds each tensor, and what it is called there."""
    found = []
    for name in names:
        owner, _, leaf = name.rpartition(".")
        found.append((model.get_submodule(owner), leaf))
    return found
