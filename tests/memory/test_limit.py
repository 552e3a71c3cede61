"""Limits on the host's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import anybatch.memory.limit as limit
from anybatch.memory.limit import cgroup_limit, host_limits, limit_growth, usable_bytes
from anybatch.memory.reading import Quantity, Reading

MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"


def write_group(mount: Path, limits: dict[str, str]) -> None:
    """Writes a tree of control groups: file below the mount, and what it holds."""
    for name, text in limits.items():
        file = mount / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.mark.parametrize(
    ("membership", "limits", "expected_bytes"),
    [
        ("0::/", {"memory.max": "1048576"}, MIB),
        ("0::/", {"memory.max": "max"}, None),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "2097152", "memory.max": "max"}, 2 * MIB),
        ("0::/a/b", {"a/b/memory.max": "4194304", "a/memory.max": "2097152"}, 2 * MIB),
        ("0::/not/mounted/here", {"memory.max": "1048576"}, MIB),
        ("5:cpu:/\n4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "1048576"}, MIB),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": NO_LIMIT_V1}, None),
        ("4:memory:/docker/abc", {"memory/memory.limit_in_bytes": "1048576"}, MIB),
        ("5:cpu:/", {"memory/memory.limit_in_bytes": "1048576"}, None),
        ("1:name=x:y:/", {}, None),
        ("0::/", {}, None),
    ],
)
def test_cgroup_limit(
    membership: str, limits: dict[str, str], expected_bytes: int | None, tmp_path: Path
) -> None:
    """The smallest limit of the process's groups, of either version, binds, also inside a container."""
    (tmp_path / "cgroup").write_text(membership + "\n")
    write_group(tmp_path / "mount", limits)
    assert cgroup_limit(tmp_path / "mount", tmp_path / "cgroup").amount_bytes == expected_bytes


def test_cgroup_limit_names_the_file(tmp_path: Path) -> None:
    """The source of a limit is the file that sets it."""
    (tmp_path / "cgroup").write_text("0::/a\n")
    write_group(tmp_path, {"a/memory.max": "max", "memory.max": "1048576"})
    assert str(tmp_path / "memory.max") in cgroup_limit(tmp_path, tmp_path / "cgroup").source


def test_cgroup_limit_without_groups(tmp_path: Path) -> None:
    """A system without control groups has no such limit."""
    assert cgroup_limit(tmp_path, tmp_path / "cgroup").amount_bytes is None


def test_usable_bytes_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process may use is the least of the machine's, the container's and its own limit."""
    monkeypatch.setattr(limit, "cgroup_limit", lambda: Reading(Quantity.LIMIT, 3 * MIB, "group"))
    assert usable_bytes() == 3 * MIB
    monkeypatch.setattr(limit, "cgroup_limit", lambda: Reading(Quantity.LIMIT, None, "group"))
    monkeypatch.setattr(limit, "_data_limit_bytes", lambda: None)
    assert usable_bytes() == psutil.virtual_memory().total


def test_host_limits_say_what_is_not_set() -> None:
    """Every kind of limit is listed with its source, also one that is not set."""
    sources = " ".join(each.source for each in host_limits())
    assert "psutil" in sources
    assert "control group" in sources
    assert "RLIMIT_DATA" in sources


LIMITED_PROCESS = """
import torch
from anybatch.memory.limit import host_limits, limit_growth
from anybatch.memory.process import data_bytes
torch.set_num_threads(1)
start_bytes = data_bytes()
def fits(mib):
    try:
        torch.empty(mib << 20, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True
print(fits(200), limit_growth(128 << 20), fits(200), fits(64), fits(127))
print(host_limits()[-1].amount_bytes - start_bytes)
print(limit_growth(1 << 40), host_limits()[-1].amount_bytes - start_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory")
def test_limit_growth_is_enforced() -> None:
    """Under a limit of 128 MiB, 64 MiB fit and 200 MiB do not; a later, higher limit changes nothing."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED_PROCESS], capture_output=True, text=True, check=True
    )
    tries, reported, again = result.stdout.splitlines()
    assert tries.split()[:4] == ["True", "True", "False", "True"]
    assert int(reported) == pytest.approx(128 * MIB, abs=4 * MIB)
    assert again.split() == ["True", reported]


def test_limit_growth_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off Linux nothing is limited, and the answer says so."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert limit_growth(1) is False
    assert limit.can_limit_growth() is False


def test_limit_growth_that_the_kernel_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that can be set but does not stop an allocation is reported as not in force."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    assert limit_growth(MIB) is False
