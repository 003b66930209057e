"""Options that act under a condition only: to set one where it does nothing is a mistake."""

from dataclasses import fields
from typing import Any

from sizewise.errors import ConfigError


def acts_only(options: Any, name: str, condition: str, holds: bool) -> None:
    """Raise ConfigError if an option of a method was set though it has no effect.

    Args:
        options: The method's options, a dataclass.
        name: The option.
        condition: When it acts, as it stands in a config: "method.levels = 'dynamic'".
        holds: Whether that is so.
    """
    (default,) = (field.default for field in fields(options) if field.name == name)
    if not holds and getattr(options, name) != default:
        raise ConfigError(
            f"method.{name} acts with {condition} only; set that, or leave method.{name} out"
        )
