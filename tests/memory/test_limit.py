"""Limits on the host's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import anybatch.memory.limit as limit
from anybatch.memory.cgroup import GroupLimit
from anybatch.memory.limit import HostLimit, binding_limit, host_limits, limit_growth
from anybatch.memory.process import Currency

MIB = 1 << 20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with 8 MiB, 6 of them free, whose other limits a test sets."""
    found: dict[str, Any] = {"groups": (), "data": None, "mapped": None, "held": MIB}
    memory = SimpleNamespace(total=8 * MIB, available=6 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(limit, "group_limits", lambda: found["groups"])
    monkeypatch.setattr(limit, "HostCounter", lambda currency: lambda: found["held"])
    resource = pytest.importorskip("resource")
    names = {resource.RLIMIT_DATA: "data", resource.RLIMIT_AS: "mapped"}

    def get(which: int) -> tuple[int, int]:
        soft = found[names[which]]
        return (resource.RLIM_INFINITY if soft is None else soft, resource.RLIM_INFINITY)

    monkeypatch.setattr(resource, "getrlimit", get)
    monkeypatch.setattr(sys, "platform", "linux")
    return found


def _group(limit_mib: int, free_mib: int) -> GroupLimit:
    return GroupLimit(Path(f"/group/{limit_mib}"), limit_mib * MIB, free_mib * MIB)


def test_machine_binds_where_nothing_else_does(limits: dict[str, Any]) -> None:
    """Without other limits the machine's memory is the limit, and what it has left is free."""
    assert binding_limit() == HostLimit(8 * MIB, 6 * MIB, Currency.RESIDENT, "memory of the machine (psutil)")


def test_least_free_memory_binds_and_not_the_smallest_limit(limits: dict[str, Any]) -> None:
    """A group of 20 MiB with 2 MiB left binds before a limit of 7 MiB of which this process holds 1."""
    limits["data"] = 7 * MIB
    limits["groups"] = (_group(20, 2), _group(30, 9))
    found = binding_limit()
    assert (found.amount_bytes, found.free_bytes) == (20 * MIB, 2 * MIB)
    assert found.currency is Currency.RESIDENT
    assert found.source == "control group (/group/20)"


@pytest.mark.parametrize(("name", "currency"), [("data", Currency.DATA), ("mapped", Currency.MAPPED)])
def test_limits_of_the_process_count_in_their_own_way(
    name: str, currency: Currency, limits: dict[str, Any]
) -> None:
    """`ulimit -d` counts data and `ulimit -v` what is mapped; what is held of them is not free."""
    limits[name] = 4 * MIB
    assert binding_limit() == HostLimit(4 * MIB, 3 * MIB, currency, binding_limit().source)
    limits["held"] = 5 * MIB
    assert binding_limit().free_bytes == 0


def test_limits_of_the_process_off_linux(limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere RLIMIT_DATA does not count what torch maps, and is left out."""
    limits["data"] = 1
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [each.source for each in host_limits()] == ["memory of the machine (psutil)"]


LIMITED_PROCESS = """
import torch
from anybatch.memory.limit import binding_limit, limit_growth
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
limit = binding_limit()
print(limit.amount_bytes - start_bytes, limit.source)
print(limit_growth(1 << 40), binding_limit().amount_bytes - start_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory")
def test_limit_growth_is_enforced() -> None:
    """Under a limit of 128 MiB, 64 MiB fit and 200 MiB do not; a later, higher limit changes nothing."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED_PROCESS], capture_output=True, text=True, check=True
    )
    tries, reported, again = result.stdout.splitlines()
    assert tries.split()[:4] == ["True", "True", "False", "True"]
    limit_bytes, source = reported.split()
    assert source == "RLIMIT_DATA"
    assert int(limit_bytes) == pytest.approx(128 * MIB, abs=4 * MIB)
    assert again.split() == ["True", limit_bytes]


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
