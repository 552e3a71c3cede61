"""Any batch size, in the memory you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anybatch import errors
from anybatch._apply import apply

if TYPE_CHECKING:
    from anybatch import techniques
    from anybatch._monitor import MemoryMonitor
    from anybatch._verify import Verification, verify
    from anybatch.fit.auto import Auto

__all__ = ["Auto", "MemoryMonitor", "Verification", "apply", "errors", "techniques", "verify"]

_ROOMS = {
    "Auto": "fit.auto",
    "MemoryMonitor": "_monitor",
    "Verification": "_verify",
    "verify": "_verify",
}


def __getattr__(name: str) -> Any:
    """Loads what only some programs use when they use it."""
    if name == "techniques":
        return import_module("anybatch.techniques")
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"anybatch.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
