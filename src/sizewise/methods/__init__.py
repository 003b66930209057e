"""The methods, one file each; a file's name is the method's name on the command line.

Names are found without importing the files, so that listing them costs nothing. A method of your
own is named "package.module:ClassName".
"""

import importlib
import inspect
import os
import pkgutil
import sys
from typing import TYPE_CHECKING

from sizewise.errors import ConfigError
from sizewise.structure import nearest

if TYPE_CHECKING:
    from sizewise.method import Method


def names() -> list[str]:
    """Return the names of the built-in methods."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(name: str) -> "type[Method]":
    """Return a method's class by its name."""
    path, _, attribute = name.partition(":")
    if not attribute:
        if path not in names():
            raise ConfigError(f"unknown method {name!r}; {nearest(name, names())}")
        module = importlib.import_module(f"{__name__}.{path.replace('-', '_')}")
        return _only_method(module.__name__, vars(module))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"method {name!r} cannot be imported: {error}") from None
    return _only_method(name, {attribute: found})


def _only_method(where: str, found: dict[str, object]) -> "type[Method]":
    from sizewise.method import Method

    for value in found.values():
        is_method = inspect.isclass(value) and issubclass(value, Method) and value is not Method
        # A file may import the method that it builds on; its own is the one it defines.
        if is_method and (":" in where or value.__module__ == where):
            return value  # type: ignore[return-value]
    raise ConfigError(f"{where!r} holds no class derived from sizewise.Method; add one")
