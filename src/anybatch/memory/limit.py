"""Which limits this process has on the host's memory, and setting one of its own."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import psutil

from anybatch.memory.cgroup import group_limits
from anybatch.memory.process import Currency, HostCounter, data_bytes

__all__ = ["HostLimit", "binding_limit", "can_limit_growth", "can_map", "host_limits", "limit_growth"]


@final
@dataclass(frozen=True)
class HostLimit:
    """A limit on what this process may hold of the host's memory.

    Attributes:
        amount_bytes: The limit.
        free_bytes: What is still to be had under it, now.
        currency: How it counts.
        source: Who sets it.
    """

    amount_bytes: int
    free_bytes: int
    currency: Currency
    source: str


def host_limits() -> tuple[HostLimit, ...]:
    """Every limit on the host's memory that this process is under."""
    return (*_process_limits(), *_group_limits(), _machine_limit())


def binding_limit() -> HostLimit:
    """The limit under which the least is still to be had: it is met first."""
    return min(host_limits(), key=lambda limit: limit.free_bytes)


def _machine_limit() -> HostLimit:
    memory = psutil.virtual_memory()
    return HostLimit(memory.total, memory.available, Currency.RESIDENT, "memory of the machine (psutil)")


def _group_limits() -> Iterator[HostLimit]:
    for group in group_limits():
        source = f"control group ({group.file})"
        yield HostLimit(group.limit_bytes, group.free_bytes, Currency.RESIDENT, source)


def _process_limits() -> Iterator[HostLimit]:
    """What the process itself was given (`ulimit`); only Linux counts mapped memory in RLIMIT_DATA."""
    if sys.platform != "linux":
        return
    import resource

    limits = (
        (resource.RLIMIT_DATA, "RLIMIT_DATA", Currency.DATA),
        (resource.RLIMIT_AS, "RLIMIT_AS", Currency.MAPPED),
    )
    for which, source, currency in limits:
        soft_bytes, _ = resource.getrlimit(which)
        if soft_bytes != resource.RLIM_INFINITY:
            free_bytes = max(0, soft_bytes - HostCounter(currency)())
            yield HostLimit(soft_bytes, free_bytes, currency, source)


def can_limit_growth() -> bool:
    """Whether this system can hold a process to a limit: only Linux counts mapped memory (since 4.7)."""
    return sys.platform == "linux"


def limit_growth(growth_bytes: int) -> bool:
    """Lets this process hold `growth_bytes` more than now, and no more, for good.

    An allocation beyond that fails as it does when a machine's memory is used up: the C library gets none,
    and torch raises. A lower limit that is already set stays.

    Returns:
        Whether the limit is in force: tried by mapping more than it allows. False also off Linux.
    """
    if sys.platform != "linux":
        return False
    import resource

    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = data_bytes() + growth_bytes
    if soft_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, soft_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return not can_map(growth_bytes + mmap.PAGESIZE)


def can_map(size_bytes: int) -> bool:
    """Would an allocation of so many bytes get memory now? True on Windows, where mapping tells nothing."""
    if sys.platform == "win32":
        return True
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
