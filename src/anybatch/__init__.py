"""Any batch size, in the memory you have."""

from typing import TYPE_CHECKING, Any

from anybatch import errors
from anybatch._apply import apply

if TYPE_CHECKING:
    from anybatch._verify import Verification, verify

__all__ = ["Verification", "apply", "errors", "verify"]


def __getattr__(name: str) -> Any:
    """Loads what only some programs use when they use it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from anybatch import _verify

    return getattr(_verify, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
