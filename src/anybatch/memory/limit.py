"""Which limits this process has on the host's memory, and setting one of its own."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

from anybatch.memory.process import data_bytes
from anybatch.memory.reading import Quantity, Reading

__all__ = ["can_limit_growth", "cgroup_limit", "host_limits", "limit_growth", "usable_bytes"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest page-aligned number.
_NO_LIMIT_BYTES = 1 << 60


def host_limits() -> tuple[Reading, ...]:
    """Every limit on the host's memory that binds this process, with its source; None where one isn't set."""
    return (
        Reading(Quantity.LIMIT, psutil.virtual_memory().total, "memory of the machine (psutil)"),
        cgroup_limit(),
        Reading(Quantity.LIMIT, _data_limit_bytes(), "RLIMIT_DATA"),
    )


def usable_bytes() -> int:
    """The smallest limit on what this process may hold: the machine's, its container's or its own."""
    return min(limit.amount_bytes for limit in host_limits() if limit.amount_bytes is not None)


def cgroup_limit(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> Reading:
    """The smallest memory limit of the control groups (version 1 or 2) around this process.

    Inside a container the group's path may not exist below the mount: the mount itself is then the group.
    """
    found = [
        (int(text), file)
        for file in _limit_files(mount, membership)
        if file.is_file() and (text := file.read_text().strip()) != "max"
    ]
    binding = [(amount_bytes, file) for amount_bytes, file in found if amount_bytes < _NO_LIMIT_BYTES]
    if not binding:
        return Reading(Quantity.LIMIT, None, "control group")
    amount_bytes, file = min(binding)
    return Reading(Quantity.LIMIT, amount_bytes, f"control group ({file})")


def _limit_files(mount: Path, membership: Path) -> Iterator[Path]:
    """Where a limit may be written: at the group of this process and at each group around it."""
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from (mount / each / "memory.max" for each in _group_and_parents(group))
        elif "memory" in controllers.split(","):
            yield from (
                mount / "memory" / each / "memory.limit_in_bytes" for each in _group_and_parents(group)
            )


def _group_and_parents(group: str) -> Iterator[str]:
    inside = PurePosixPath(group.lstrip("/"))
    yield from (str(each) for each in (inside, *inside.parents))


def _data_limit_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft_bytes == resource.RLIM_INFINITY else soft_bytes


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
    return not _can_map(growth_bytes + mmap.PAGESIZE)


def _can_map(size_bytes: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
