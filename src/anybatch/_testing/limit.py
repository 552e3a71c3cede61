"""A limit on the memory of this process, for the length of a block."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from anybatch.memory.limit import can_map
from anybatch.memory.malloc import mmap_threshold
from anybatch.memory.process import data_bytes

__all__ = ["memory_limit"]


@contextmanager
def memory_limit(growth_bytes: int, *, malloc: int | None = None) -> Iterator[int]:
    """A context in which this process can hold so much more of the host's memory than now, and no more.

    The limit is a real one, of the operating system: beyond it torch's CPU allocator raises as it does when a
    machine's memory is used up. It holds for all threads. It is put back at the end, also after an error. A
    lower limit that is already set stays.

    How much fits depends on what the process did before, for glibc's malloc keeps freed memory in pieces.
    With `malloc` larger allocations are given back when they are freed, which makes that repeatable.

    Args:
        growth_bytes: Bytes beyond those that the process holds now, at least 0.
        malloc: Allocations of at least so many bytes are mapped by themselves meanwhile (`1 << 20`, say;
            smaller sizes leave less unused, and take more time). None leaves malloc as it is. At the end the
            size is put back to what is known of it; glibc does not adjust it by itself any more then.

    Yields:
        The limit in bytes, as the operating system counts them (VmData under RLIMIT_DATA).

    Raises:
        NotImplementedError: The system can't hold a process to a limit (only Linux counts mapped memory), or
            `malloc` is given and memory does not come from glibc's malloc.
        ValueError: `growth_bytes` is negative, or `malloc` is less than 1.

    Example:
        >>> import sys, torch
        >>> from anybatch.testing import memory_limit
        >>> def fits(floats):
        ...     try:
        ...         torch.empty(floats)
        ...     except RuntimeError:
        ...         return False
        ...     return True
        >>> if sys.platform == "linux":
        ...     with memory_limit(64 << 20):
        ...         print(fits(1 << 20), fits(1 << 26))
        ... else:
        ...     print("True False")
        True False
    """
    if growth_bytes < 0:
        raise ValueError(
            f"`memory_limit`: bytes beyond those held now are at least 0. Got {growth_bytes}. Pass 256 << 20."
        )
    if sys.platform != "linux":
        raise NotImplementedError(
            f"`memory_limit`: only Linux holds a process to a limit on its memory. Got {sys.platform}. "
            "Skip what needs it there, or use `fail_at`."
        )
    with ExitStack() as stack:
        if malloc is not None and not stack.enter_context(mmap_threshold(malloc)):
            raise NotImplementedError(
                "`memory_limit`: `malloc` sets glibc's malloc. Got memory from another one. Leave it out."
            )
        yield stack.enter_context(_limited(growth_bytes))


@contextmanager
def _limited(growth_bytes: int) -> Iterator[int]:
    assert sys.platform == "linux"
    import resource

    # What only a cycle of references holds may go at any time, and would count as room.
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    limit_bytes = min(data_bytes() + growth_bytes, *limits) if limits else data_bytes() + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, before[1]))
    try:
        if can_map(growth_bytes + (1 << 20)):
            raise NotImplementedError(
                "`memory_limit`: the kernel keeps RLIMIT_DATA for mapped memory (Linux since 4.7). Got "
                f"{growth_bytes + (1 << 20)} bytes under a limit of {growth_bytes} more. Skip what needs it "
                "here, or use `fail_at`."
            )
        yield limit_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
