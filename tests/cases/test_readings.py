"""Readings of memory that are taken for each other (pytorch/pytorch#40989, psf/pyperf#173).

Reported: what is in use now taken for the peak; a peak that holds the warm-up, or that somebody has reset;
what is reserved taken for what is used; KiB for bytes; the machine's memory for the container's limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import psutil
import pytest
import torch

import anybatch.memory.limit as limit
from anybatch.memory.cgroup import GroupLimit
from anybatch.memory.peak import PeakMeter
from anybatch.memory.state import memory_of

MIB = 1 << 20
CPU = torch.device("cpu")

MEASURED = """
import json, torch
from anybatch.memory.peak import PeakMeter
from anybatch.memory.process import read_status
from anybatch.memory.state import memory_of
torch.set_num_threads(1)
cpu = torch.device("cpu")
torch.ones(600 << 20, dtype=torch.uint8)
mark = read_status()["VmHWM"]
with PeakMeter(cpu) as meter:
    block = torch.ones(300 << 20, dtype=torch.uint8)
    block.sum(dtype=torch.uint8)
    del block
kept = meter.end_bytes - meter.begin_bytes
stays = read_status()["VmHWM"] == mark
print(json.dumps([meter.growth_bytes, kept, stays, memory_of(cpu).peak.amount_bytes >= mark]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_of_a_block_after_a_larger_warm_up() -> None:
    """300 MiB after 600 MiB peak at 300 MiB and are back at the end; the process's own mark stays."""
    run = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    growth_bytes, kept_bytes, mark_stays, peak_stays = json.loads(run.stdout)
    assert growth_bytes == pytest.approx(300 * MIB, abs=20 * MIB)
    assert abs(kept_bytes) <= 20 * MIB
    assert mark_stays
    assert peak_stays


@pytest.fixture(params=["cuda", "xpu"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A stand-in of which tensors hold 10 of 80 reserved bytes, with a peak of 70, that refuses resets."""
    device = torch.device(request.param, 0)

    def refuse(*_: Any) -> None:
        raise AssertionError("a counter of the user's was reset")

    def replace(module: Any, name: str, answer: Any) -> None:
        stand_in = create_autospec(getattr(module, name), side_effect=answer)
        monkeypatch.setattr(module, name, stand_in)

    memory, module = torch.accelerator.memory, torch.get_device_module(device)
    replace(memory, "memory_allocated", lambda _: 10)
    replace(memory, "max_memory_allocated", lambda _: 70)
    replace(memory, "memory_reserved", lambda _: 80)
    replace(module, "mem_get_info", lambda _: (10, 100))
    replace(module, "get_per_process_memory_fraction", lambda _: 1.0)
    for each in (memory, torch.cuda, torch.xpu):
        replace(each, "reset_peak_memory_stats", refuse)
        replace(each, "reset_accumulated_memory_stats", refuse)
    return device


def test_counters_of_the_user_are_not_reset(accelerator: torch.device) -> None:
    """Reading a device and measuring a block call none of torch's resets."""
    with PeakMeter(accelerator):
        memory = memory_of(accelerator)
    assert memory.peak.amount_bytes == 70


def test_reserved_is_not_used(accelerator: torch.device) -> None:
    """What the allocator keeps for later is told apart from what tensors hold."""
    memory = memory_of(accelerator)
    assert memory.live.amount_bytes == 10
    assert memory.reserved.amount_bytes == 80


@pytest.mark.parametrize(("group_mib", "expected_mib"), [(64, 64), (512, 256)])
def test_limit_is_the_smaller_of_machine_and_container(
    group_mib: int, expected_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 256 MiB a container's limit counts where it is smaller."""
    group = GroupLimit(Path("/group"), group_mib * MIB, group_mib * MIB)
    machine = SimpleNamespace(total=256 * MIB, available=256 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(limit, "group_limits", lambda: (group,))
    monkeypatch.setattr(limit, "_process_limits", lambda: iter(()))
    assert memory_of(CPU).limit.amount_bytes == expected_mib * MIB
