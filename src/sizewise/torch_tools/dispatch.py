"""The base of what watches torch's operations."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not hide from its compiler.

    Hiding it costs an import of the compiler, over a second, and some microseconds for every
    operation. Nothing here is ever compiled. Derived modes say in `_operate` what is run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._operate(func, args, kwargs or {})

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        """Return what an operation returns."""
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
