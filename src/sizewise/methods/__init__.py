"""The methods, one file or folder each; its name is the method's name on the command line.

Names are found without importing the files, so that listing them costs nothing. Methods of your own
are files in a folder `sizewise_methods`, in the current folder or anywhere on Python's path; or
classes named "package.module:ClassName".
"""

import importlib
import inspect
import os
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sizewise.common.structure import nearest
from sizewise.errors import ConfigError

if TYPE_CHECKING:
    from sizewise.families.base import Method


OWN = "sizewise_methods"
"""The package that holds methods of others: each distribution and folder adds its files to it."""


def names() -> list[str]:
    """Return the names of the built-in methods and of those in `sizewise_methods`."""
    return sorted(files())


def files() -> dict[str, Path]:
    """Return the file of each method, by name; a built-in one cannot be replaced."""
    own = [str(Path(entry, OWN)) for entry in (*reversed(sys.path), os.getcwd())]
    return {
        module.name.replace("_", "-"): Path(place, module.name, "__init__.py")
        if module.ispkg
        else Path(place, f"{module.name}.py")
        for place in (*own, *__path__)
        for module in pkgutil.iter_modules([place])
    }


def find(name: str) -> "type[Method]":
    """Return a method's class by its name."""
    path, _, attribute = name.partition(":")
    if not attribute:
        known = files()
        if path not in known:
            raise ConfigError(f"unknown method {name!r}; {nearest(name, sorted(known))}")
        home = __name__ if known[path].is_relative_to(Path(__file__).parent) else OWN
        if home == OWN:
            _look_here()
        try:
            module = importlib.import_module(f"{home}.{path.replace('-', '_')}")
        except Exception as error:  # a file of the user's may raise anything
            if home != OWN:
                raise
            raise ConfigError(f"{str(known[path])!r} cannot be imported: {error}") from error
        return _only_method(module.__name__, vars(module))
    _look_here()
    try:
        found = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"method {name!r} cannot be imported: {error}") from None
    return _only_method(name, {attribute: found})


def _look_here() -> None:
    """Let the current folder be imported from; at the end, so that it hides nothing."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _only_method(where: str, found: dict[str, object]) -> "type[Method]":
    from sizewise.families.base import Method

    for value in found.values():
        is_method = inspect.isclass(value) and issubclass(value, Method) and value is not Method
        # A file may import the method that it builds on; its own is the one it defines.
        if is_method and (":" in where or value.__module__ == where):
            return value  # type: ignore[return-value]
    raise ConfigError(f"{where!r} holds no class derived from sizewise.Method; add one")
