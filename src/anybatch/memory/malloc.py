"""glibc's malloc: from which size on an allocation is mapped by itself, and given back once it is freed.

Below that size freed memory stays with the process, in pieces that the next allocation may not fit into. By
default the size grows with what is freed, up to 32 MiB, so that what a process can hold under a limit depends
on all that it did before. A fixed one makes that repeatable; it costs time where small tensors are mapped,
too. Nothing is set unless it is asked for.

Source: mallopt(3), M_MMAP_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

__all__ = ["MallocSetting", "malloc_setting", "mmap_threshold", "reusable_bytes", "set_mmap_threshold"]

_M_MMAP_THRESHOLD = -3
_DEFAULT_BYTES = 128 << 10
_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
_TUNABLE = "glibc.malloc.mmap_threshold"


@final
@dataclass(frozen=True)
class MallocSetting:
    """From which size on an allocation is mapped by itself.

    Attributes:
        threshold_bytes: That size; where `is_adjusted`, what it was at the start of the process.
        is_adjusted: Does glibc raise it as the process frees larger allocations?
        source: Who has set it.
    """

    threshold_bytes: int
    is_adjusted: bool
    source: str


_set_here: MallocSetting | None = None


def malloc_setting() -> MallocSetting | None:
    """What is known of the setting of this process; None where its memory does not come from glibc."""
    if not _is_glibc():
        return None
    return _set_here or _set_at_start()


def set_mmap_threshold(threshold_bytes: int) -> bool:
    """Has glibc map every larger allocation of this process by itself, from now on.

    Memory that is already held is not moved. glibc stops raising the size by itself, and nothing starts that
    again in this process.

    Args:
        threshold_bytes: At least 1. With 1 MiB small tensors stay fast; 64 KiB leaves least memory unused.

    Returns:
        Whether it was set. False where memory does not come from glibc's malloc (macOS, Windows, musl, or
        another malloc in its place): there is nothing to set there.

    Raises:
        ValueError: The size is less than 1 byte.
    """
    if threshold_bytes < 1:
        raise ValueError(
            f"`set_mmap_threshold`: a size is at least 1 byte. Got {threshold_bytes}. Pass 1 << 20."
        )
    return _is_glibc() and _set(threshold_bytes, "mallopt, set by anybatch")


class _Mallinfo2(ctypes.Structure):
    """What glibc tells of its heaps, each figure a size_t; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def reusable_bytes() -> int:
    """What malloc holds that was freed: the process has it, and its next allocations may get it.

    Error: not all of it, where it lies in pieces that are too small. 0 where nobody tells (glibc before 2.33,
    or no glibc).
    """
    read = _mallinfo2()
    return 0 if read is None else int(read().fordblks)


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    read: Any = getattr(ctypes.CDLL(None), "mallinfo2", None) if _is_glibc() else None
    if read is None:
        return None
    read.restype = _Mallinfo2
    told: Callable[[], _Mallinfo2] = read
    return told


@contextmanager
def mmap_threshold(threshold_bytes: int) -> Iterator[bool]:
    """A context with another size, which is put back to what is known of it: see `malloc_setting`.

    Yields:
        Whether it was set.
    """
    before = malloc_setting()
    is_set = set_mmap_threshold(threshold_bytes)
    try:
        yield is_set
    finally:
        if is_set and before is not None:
            _set(before.threshold_bytes, before.source)


def _set(threshold_bytes: int, source: str) -> bool:
    global _set_here
    is_set = bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(threshold_bytes)))
    if is_set:
        _set_here = MallocSetting(threshold_bytes, False, source)
    return is_set


def _is_glibc() -> bool:
    """Is glibc the C library, and its malloc the one that this process calls?"""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None
    except ValueError:  # a C library that does not know the question
        name = None
    return name is not None and name.startswith("glibc") and _has_own_malloc()


def _has_own_malloc() -> bool:
    """Another malloc may have been loaded before the library's own (`LD_PRELOAD`)."""
    called, own = (ctypes.cast(ctypes.CDLL(name).malloc, ctypes.c_void_p) for name in (None, "libc.so.6"))
    return called.value == own.value


def _set_at_start() -> MallocSetting:
    """What the environment had said when the process began, by its variables as they are now."""
    tunables = dict(
        tunable.split("=", 1) for tunable in os.environ.get("GLIBC_TUNABLES", "").split(":") if "=" in tunable
    )
    for text, source in (
        (tunables.get(_TUNABLE), f"GLIBC_TUNABLES ({_TUNABLE})"),
        (os.environ.get(_VARIABLE), _VARIABLE),
    ):
        threshold_bytes = _parsed(text)
        if threshold_bytes is not None:
            return MallocSetting(threshold_bytes, False, source)
    return MallocSetting(_DEFAULT_BYTES, True, "glibc's default")


def _parsed(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:  # glibc, too, passes over what is no number
        return None
