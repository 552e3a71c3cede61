"""The limits of control groups, of both versions, in folders as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from anybatch.memory.cgroup import GroupLimit, group_limits

MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"


def limits_of(folder: Path, membership: str, files: dict[str, str]) -> list[int]:
    """Limits of a process of these groups, where the files below the mount hold these texts; as bytes."""
    return sorted(limit.limit_bytes for limit in _groups(folder, membership, files))


def free_of(folder: Path, membership: str, files: dict[str, str]) -> list[int]:
    """What is still free under each limit, in bytes."""
    return [limit.free_bytes for limit in _groups(folder, membership, files)]


def _groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[GroupLimit, ...]:
    (folder / "cgroup").write_text(membership + "\n")
    for name, text in files.items():
        file = folder / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return group_limits(folder / "mount", folder / "cgroup")


@pytest.mark.parametrize(
    ("membership", "files", "expected_bytes"),
    [
        ("0::/", {"memory.max": "1048576"}, [MIB]),
        ("0::/", {"memory.max": "max"}, []),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "2097152", "memory.max": "max"}, [2 * MIB]),
        ("0::/a/b", {"a/b/memory.max": "4194304", "a/memory.max": "2097152"}, [2 * MIB, 4 * MIB]),
        ("0::/not/mounted/here", {"memory.max": "1048576"}, [MIB]),
        ("5:cpu:/\n4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "1048576"}, [MIB]),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": NO_LIMIT_V1}, []),
        ("4:memory:/docker/abc", {"memory/memory.limit_in_bytes": "1048576"}, [MIB]),
        ("5:cpu:/", {"memory/memory.limit_in_bytes": "1048576"}, []),
        ("1:name=x:y:/", {}, []),
        ("0::/", {}, []),
    ],
)
def test_limits(membership: str, files: dict[str, str], expected_bytes: list[int], tmp_path: Path) -> None:
    """The limits of the process's groups, of either version, are found, also inside a container."""
    assert limits_of(tmp_path, membership, files) == expected_bytes


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            "0::/a",
            {
                "a/memory.max": "1000",
                "a/memory.current": "700",
                "a/memory.stat": "anon 1\ninactive_file 200\nactive_file 5",
            },
        ),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "1000",
                "memory/a/memory.usage_in_bytes": "700",
                "memory/a/memory.stat": "inactive_file 9\ntotal_inactive_file 200",
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_free_is_what_nobody_holds(membership: str, files: dict[str, str], tmp_path: Path) -> None:
    """Of 1000 bytes the group holds 700, of which 200 are page cache that goes when needed: 500 are free."""
    assert free_of(tmp_path, membership, files) == [500]


def test_free_is_never_negative(tmp_path: Path) -> None:
    """A group that holds more than a limit which was lowered under it has nothing left."""
    assert free_of(tmp_path, "0::/", {"memory.max": "100", "memory.current": "130"}) == [0]


def test_limit_names_the_file(tmp_path: Path) -> None:
    """The source of a limit is the file that sets it."""
    (limit,) = _groups(tmp_path, "0::/a", {"a/memory.max": "max", "memory.max": "1048576"})
    assert limit.file == tmp_path / "mount" / "memory.max"


def test_without_groups(tmp_path: Path) -> None:
    """A system without control groups has no such limits."""
    assert group_limits(tmp_path, tmp_path / "cgroup") == ()
