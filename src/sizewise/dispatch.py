"""The base of what watches torch's operations."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not hide from its compiler.

    Hiding it costs an import of the compiler, over a second, and some microseconds for every
    operation. Nothing here is ever compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
