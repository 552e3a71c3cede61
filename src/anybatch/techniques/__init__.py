"""Ways to use less memory, one file each, behind one interface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.techniques.accumulate_in_float32 import AccumulateInFloat32
    from anybatch.techniques.accumulation import Accumulation
    from anybatch.techniques.checkpointing import Checkpointing
    from anybatch.techniques.chunked_head import ChunkedHead
    from anybatch.techniques.empty_cache import EmptyCache
    from anybatch.techniques.freeze import Freeze
    from anybatch.techniques.loader_options import LoaderOptions
    from anybatch.techniques.loading import Loading
    from anybatch.techniques.memory_cap import MemoryCap
    from anybatch.techniques.offload import Offload
    from anybatch.techniques.precision import Precision
    from anybatch.techniques.sampling import Sampling
    from anybatch.techniques.steady_loader import SteadyLoader
    from anybatch.techniques.technique import Setting, Technique

_FILES = {
    "AccumulateInFloat32": "accumulate_in_float32",
    "Accumulation": "accumulation",
    "Checkpointing": "checkpointing",
    "ChunkedHead": "chunked_head",
    "EmptyCache": "empty_cache",
    "Freeze": "freeze",
    "LoaderOptions": "loader_options",
    "Loading": "loading",
    "MemoryCap": "memory_cap",
    "Offload": "offload",
    "Precision": "precision",
    "Sampling": "sampling",
    "Setting": "technique",
    "SteadyLoader": "steady_loader",
    "Technique": "technique",
}

__all__ = [
    "AccumulateInFloat32",
    "Accumulation",
    "Checkpointing",
    "ChunkedHead",
    "EmptyCache",
    "Freeze",
    "LoaderOptions",
    "Loading",
    "MemoryCap",
    "Offload",
    "Precision",
    "Sampling",
    "Setting",
    "SteadyLoader",
    "Technique",
]


def __getattr__(name: str) -> Any:
    """Loads a technique when it is used (Rule 6)."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
