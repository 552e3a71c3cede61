"""The control groups around this process (Linux, version 1 or 2), and what they let it hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

__all__ = ["GroupLimit", "group_limits"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest page-aligned number.
_NO_LIMIT_BYTES = 1 << 60


@final
@dataclass(frozen=True)
class _Version:
    """How one version names its files, and what can be taken back from the page cache at once."""

    folder: str
    limit: str
    usage: str
    reclaimable: str


_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("", "memory.max", "memory.current", "inactive_file")


@final
@dataclass(frozen=True)
class GroupLimit:
    """A memory limit of a group of processes that this one is in.

    Attributes:
        file: The file that sets it.
        limit_bytes: What all processes of the group may hold together.
        free_bytes: What they don't hold yet, or only as page cache that goes when needed.
    """

    file: Path
    limit_bytes: int
    free_bytes: int


def group_limits(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> tuple[GroupLimit, ...]:
    """The memory limits of the group of this process and of each group around it.

    Inside a container the group's path may not exist below the mount: the mount itself is then the group.
    """
    found = (_limit_of(folder, version) for folder, version in _folders(mount, membership))
    return tuple(limit for limit in found if limit is not None)


def _folders(mount: Path, membership: Path) -> Iterator[tuple[Path, _Version]]:
    if not membership.is_file():
        return
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        version = _V2 if controllers == "" else _V1
        if version is _V2 or "memory" in controllers.split(","):
            inside = PurePosixPath(group.lstrip("/"))
            yield from ((mount / version.folder / each, version) for each in (inside, *inside.parents))


def _limit_of(folder: Path, version: _Version) -> GroupLimit | None:
    limit_bytes = _number(folder / version.limit)
    if limit_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
        return None
    used_bytes = (_number(folder / version.usage) or 0) - _reclaimable_bytes(folder, version)
    return GroupLimit(folder / version.limit, limit_bytes, max(0, limit_bytes - max(0, used_bytes)))


def _number(file: Path) -> int | None:
    text = _text(file).strip() or "max"
    return None if text == "max" else int(text)


def _text(file: Path) -> str:
    """What the file says; nothing where there is none."""
    try:
        with open(file) as opened:
            return opened.read()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return ""


def _reclaimable_bytes(folder: Path, version: _Version) -> int:
    file = folder / "memory.stat"
    lines = (line.split() for line in _text(file).splitlines())
    return next((int(amount) for name, amount in lines if name == version.reclaimable), 0)
