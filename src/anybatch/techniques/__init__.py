"""Ways to use less memory, one file each, behind one interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.techniques.checkpointing import Checkpointing
    from anybatch.techniques.loader_options import LoaderOptions
    from anybatch.techniques.offload import Offload
    from anybatch.techniques.sampling import Sampling
    from anybatch.techniques.technique import Setting, Technique

_FILES = {
    "Checkpointing": "checkpointing",
    "LoaderOptions": "loader_options",
    "Offload": "offload",
    "Sampling": "sampling",
    "Setting": "technique",
    "Technique": "technique",
}

__all__ = [
    "Checkpointing",
    "LoaderOptions",
    "Offload",
    "Sampling",
    "Setting",
    "Technique",
]


def __getattr__(name: str) -> Any:
    """Loads a technique when it is used (Rule 6)."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
