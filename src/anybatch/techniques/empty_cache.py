"""Giving back, after steps, what an allocator holds and nobody uses."""

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from anybatch.errors import TechniqueError
from anybatch.memory.device import MemoryKind, memory_kind
from anybatch.memory.malloc import malloc_setting
from anybatch.techniques.technique import Setting, Technique


@final
@dataclass(frozen=True)
class EmptyCache(Technique):
    """Empties the cache of the device's allocator after every so many steps.

    What tensors hold, at their peak say, stays the same: other programs get what lies unused between steps,
    and memory in unfitting pieces is put together anew. Each time costs a wait for the device and new
    allocations in the next step. On the host, glibc gives back what was freed.

    Error: exact. No value is touched.

    Source: `torch.cuda.empty_cache` and its like; malloc_trim(3).

    Attributes:
        every: After how many steps of the optimizer, at least 1.

    Raises:
        TechniqueError: `every` is no such number.

    >>> EmptyCache(every=10)
    EmptyCache(every=10)
    """

    recommendation: ClassVar[int | None] = 5
    source: ClassVar[str] = "torch.cuda.empty_cache and its like; malloc_trim(3)"
    exactness: ClassVar[str] = "Exact: no value is touched."

    every: int = 1

    def __post_init__(self) -> None:
        is_right = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if not is_right:
            raise TechniqueError(
                f"`EmptyCache`: `every` is at least 1 step. Got every={self.every!r}. Write "
                f"EmptyCache(every=10), for example."
            )

    def check(self, setting: Setting) -> None:
        kind = memory_kind(setting.device)
        if kind is MemoryKind.NONE:
            reason = "which holds no values. Move the model first."
        elif kind is MemoryKind.HOST and malloc_setting() is None:
            reason = "whose memory is not glibc's, so that nobody says how to give it back. Leave it out."
        elif kind is not MemoryKind.HOST and not hasattr(_module(setting), "empty_cache"):
            reason = "whose cache torch does not empty. Leave it out."
        else:
            return
        raise TechniqueError(f"`EmptyCache`: an allocator must have a cache. Got {setting.device}, {reason}")

    def after_step(self, setting: Setting, step: int) -> None:
        if step % self.every != 0:
            return
        if memory_kind(setting.device) is MemoryKind.HOST:
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        else:
            _module(setting).empty_cache()


def _module(setting: Setting) -> Any:
    return torch.get_device_module(setting.device)
