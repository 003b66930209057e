"""The model zoo, by name; models of your own, as `"package.module:factory"`; of other libraries.

`"timm:resnet18"`, `"torchvision.models:resnet18"` and
`"transformers:BertForSequenceClassification"` are models of these libraries.

A factory is called with those of `classes`, `image`, `channels` and `width` that its signature
names, and with the options of the config. It returns a `nn.Module` that maps images of shape
(batch, channels, height, width) to logits of shape (batch, classes). In the zoo, `image` is the
shape of one image, (channels, height, width); `width` is a ratio that scales all channel counts,
and `rounding` says how, by a rule of `widths.scaled`. For texts these are `classes`,
`vocabulary`, `tokens`, `tags`, `weights` and `width`: the module maps token ids (batch, tokens) to
logits (batch, classes), or where `tags` is true to (batch, tokens, classes).

Importing this package does not import torch, so that listing the zoo is quick.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sizewise.common.structure import nearest
from sizewise.data.catalog import MEMORY
from sizewise.errors import ConfigError, ModelError, NoChannelLeft

if TYPE_CHECKING:
    from torch import nn

# Families take their depth from the name: resnet20 calls cifar_resnet(20, ...).
_FAMILIES = {
    "preresnet": "sizewise.models.preresnet:preresnet",
    "resnet": "sizewise.models.resnet:cifar_resnet",
    "densenet": "sizewise.models.densenet:densenet",
}
# "timm:resnet18" calls from_timm.build("resnet18", ...).
_LIBRARIES = {
    "timm": "sizewise.models.from_timm:build",
    "torchvision.models": "sizewise.models.from_torchvision:build",
    "transformers": "sizewise.models.from_transformers:build",
}
_MODULES = {
    "resnet": ("resnet18", "resnet34", "wide_resnet101_2"),
    "fedin": ("fedin_a", "fedin_b", "fedin_c", "fedin_d", "fedin_e"),
    "vit": ("vit", "vit_tiny", "vit_base"),
    "encoder": ("encoder",),
    "small": ("cnn", "mlp", "linear"),
}
_SINGLES = {name: f"sizewise.models.{m}:{name}" for m, names in _MODULES.items() for name in names}
_CATALOGUE = {
    "preresnet20": "pre-activation ResNet, 16/32/64 channels (FeDepth); any depth 6n + 2",
    "resnet20": "CIFAR ResNet, 16/32/64 channels (SLT); any depth 6n + 2",
    "resnet44": "as resnet20, 21 blocks (SLT)",
    "resnet56": "as resnet20, 27 blocks (SLT, NeFL)",
    "resnet110": "as resnet20, 54 blocks (NeFL)",
    "resnet18": "ResNet-18 for small images, 64 to 512 channels (NeFL, FjORD, DepthFL)",
    "resnet34": "ResNet-34 for small images, 64 to 512 channels (NeFL)",
    "wide_resnet101_2": "Wide-ResNet-101-2, bottlenecks with 128 to 1024 channels inside (NeFL)",
    "fedin_a": "model A of FedIN's Table I; fedin_b to fedin_e share its extractor and classifier",
    "fedin_b": "as fedin_a, with 1, 1 and 1 repeats in its stages instead of 2, 3 and 5",
    "fedin_c": "as fedin_a, with 2, 2 and 2 repeats",
    "fedin_d": "as fedin_a, with 1, 3 and 3 repeats",
    "fedin_e": "as fedin_a, with 1, 1 and 2 repeats",
    "densenet40": "DenseNet-BC with growth 12 (SLT); any depth 6n + 4",
    "vit": "vision transformer of any size; the default has 6 blocks of 64 dimensions",
    "vit_tiny": "ViT-Tiny, 12 blocks of 192 dimensions (FeDepth)",
    "vit_base": "ViT-Base, 12 blocks of 768 dimensions (NeFL)",
    "encoder": "text encoder of transformers: BERT, RoBERTa, DistilBERT, MiniLM (InclusiveFL)",
    "cnn": "plain convolutional network, 32/64/128 channels",
    "mlp": "perceptron with two hidden layers of 200 units",
    "linear": "logistic regression",
}


def catalogue() -> dict[str, str]:
    """Return the models of the zoo: name and one line about it."""
    return dict(_CATALOGUE)


def build(
    name: str,
    *,
    classes: int,
    image: tuple[int, ...],
    vocabulary: int = 0,
    tags: bool = False,
    sets: int = 1,
    weights: str | None = None,
    width: float = 1.0,
    args: Mapping[str, object] = {},
    check: bool = True,
) -> "nn.Module":
    """Return a new model, its weights drawn from torch's global generator.

    Args:
        name: A name in `catalogue`, another depth of one of its families, or
            `"package.module:factory"`, importable or in the current folder.
        classes: Outputs per sample, or per token.
        image: Shape of one image, (channels, height, width), or of one text, (tokens,).
        vocabulary: How many token ids there are; 0: the model is for images.
        tags: Whether every token has outputs of its own.
        sets: Label sets among which the classes are divided; see `label_sets`.
        weights: What the model will start from, for factories that look it up there.
        width: Ratio that scales the model's channel counts.
        args: The model's own options, passed on as keywords.
        check: Make sure that it gives one output per class.

    Raises:
        ConfigError: No model has this name.
        NoChannelLeft: The width leaves some layer without channels.
        ModelError: The model cannot be built like this, or does not give one output per class.
    """
    import torch
    from torch import nn

    from sizewise.models.common import check_output
    from sizewise.models.memory import Built

    make = factory(name)
    data: dict[str, object] = {"classes": classes, "width": width, "weights": weights, "sets": sets}
    if vocabulary:
        data |= {"vocabulary": vocabulary, "tokens": image[0], "tags": tags}
    else:
        data |= {"image": image, "channels": image[0]}
    try:
        built = isinstance(make, Built)  # It has what it needs of the data.
        model = make(**(args if built else _keywords(name, make, data, args)))
    except Exception as error:  # a factory of the user's may raise anything
        given = ", ".join(f"{key} = {value!r}" for key, value in args.items()) or "no options"
        reason = str(error).partition("\n")[0] or type(error).__name__
        if len(image) == 1 and not vocabulary:
            reason += f" (the data holds vectors of {image[0]}, as 'mlp' and 'linear' take them)"
        known = NoChannelLeft if isinstance(error, NoChannelLeft) else ModelError
        raise known(f"the model {name!r} cannot be built with {given}: {reason}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name!r} gives a {type(model).__name__}; a factory returns a torch.nn.Module"
        )
    if width < 1 and not all(parameter.numel() for parameter in model.parameters()):
        raise NoChannelLeft(
            f"the model {name!r} has a layer without channels at width {width:.4g}; "
            "use a larger width, or let its factory keep at least one"
        )
    if not check:
        return model
    kind = torch.int64 if vocabulary else torch.float32
    sample = torch.zeros((2, *image), dtype=kind)
    outputs = (classes,) if sets == 1 else (sets, classes // sets)
    check_output(model, sample, (2, *(image if tags else ()), *outputs))
    return model


_AT_HAND: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("at hand", default={})  # noqa: B039  (never changed)


@contextmanager
def at_hand(name: str, make: Callable[..., Any]) -> Iterator[None]:
    """Let a name stand for a factory that the caller has, whatever is stored under it by now."""
    token = _AT_HAND.set({**_AT_HAND.get(), name: make})
    try:
        yield
    finally:
        _AT_HAND.reset(token)


def is_at_hand(name: str) -> bool:
    """Return whether a name stands for a factory that the caller has."""
    return name in _AT_HAND.get()


def takes_width(name: str) -> bool:
    """Return whether a model's factory can build it at any width."""
    return "width" in inspect.signature(factory(name)).parameters


def factory(name: str) -> Callable[..., Any]:
    """Return the function that builds a model; raise ConfigError if nothing has this name."""
    if name in _AT_HAND.get():
        return _AT_HAND.get()[name]
    if name.startswith(MEMORY):
        raise ConfigError(
            f"the model {name.removeprefix(MEMORY)!r} was given in memory; give it again, from "
            "Python: sizewise.resume(folder, model=...), which also exports, or "
            "sizewise.deployment.load(file, model=...)"
        )
    library, separator, wanted = name.partition(":")
    if library in _LIBRARIES:
        return partial(_load(_LIBRARIES[library]), wanted)
    if separator:
        # An installed command does not look in the current folder by itself. At the end, so that
        # no file there hides a package; for good, as the factory may import more when called.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return _load(name)
    if name in _SINGLES:
        return _load(_SINGLES[name])
    if (match := re.fullmatch(r"([a-z]+)(\d+)", name)) and match[1] in _FAMILIES:
        return partial(_load(_FAMILIES[match[1]]), int(match[2]))
    raise ConfigError(
        f"no model is called {name!r}; {nearest(name, _CATALOGUE)} "
        "(a model of your own is 'package.module:factory', one of timm 'timm:resnet18')"
    )


def _load(reference: str) -> Callable[..., Any]:
    """Return what `"package.module:factory"` names."""
    module_name, _, attribute = reference.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a file of the user's may raise anything
        raise ConfigError(
            f"cannot import {module_name!r} for the model {reference!r} ({error}); "
            "install it, or run where its file is"
        ) from error
    found = getattr(module, attribute, None)
    if module_name == "__main__" and getattr(found, "__module__", None) != "__main__":
        raise ConfigError(
            f"the model {reference!r} belongs to the script or notebook that defines it, and this "
            "is another program; give it again, with sizewise.resume(folder, model=...), or move "
            "it into a file of its own and train again"
        )
    if not callable(found):
        raise ConfigError(f"the module {module_name!r} has no function or class {attribute!r}")
    return found  # type: ignore[no-any-return]


def _keywords(
    name: str,
    factory: Callable[..., Any],
    data: Mapping[str, object],
    args: Mapping[str, object],
) -> dict[str, object]:
    """Return what to call a factory with: what it asks for of the data, and the options."""
    signature = inspect.signature(factory).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature)
    asked = [p for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = {p.name: p.annotation for p in asked}
    needed = {p.name for p in asked if p.default is p.empty}
    if "vocabulary" in data and "vocabulary" not in named:
        raise ModelError(
            f"the model {name!r} takes no 'vocabulary', so it is not for texts; "
            "use 'encoder', or data with images"
        )
    if "vocabulary" in needed and "vocabulary" not in data:
        raise ModelError(
            f"the model {name!r} is for texts; use another one for images, such as 'cnn'"
        )
    if data["sets"] != 1 and "sets" not in named:
        raise ModelError(
            f"the model {name!r} takes no 'sets', so it cannot have a head for each of "
            f"{data['sets']} silos; use 'encoder', or data without silos"
        )
    if data["width"] != 1 and "width" not in named:
        raise ModelError(
            f"the model {name!r} cannot be built at width {data['width']}, as its factory takes "
            "no 'width'; add that parameter or use width 1"
        )
    for option, value in args.items():
        if option in data and (option in named or not takes_any):
            raise ModelError(
                f"{option!r} is no option of the model {name!r}: the run sets it; leave it out"
            )
        if option not in named and not takes_any:
            options = ", ".join(key for key in named if key not in data)
            raise ModelError(
                f"the model {name!r} has no option {option!r}; it takes {options or 'none'}"
            )
        if not _fits(value, named.get(option)):
            raise ModelError(
                f"the option {option!r} of the model {name!r} is of type "
                f"{named[option].__name__}; {value!r} came"
            )
    return {key: value for key, value in data.items() if key in named} | dict(args)


def _fits(value: object, annotation: object) -> bool:
    """Tell whether an option has the scalar type its factory asks for; other types pass."""
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation in (bool, int, str):
        return type(value) is annotation
    return True
