"""The five figures of a device, on the host and on stand-ins for devices that this machine lacks."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
import torch

import anybatch.memory.gauge as gauge
import anybatch.memory.state as state
from anybatch.memory.gauge import gauge_of
from anybatch.memory.limit import HostLimit
from anybatch.memory.process import Currency, read_status
from anybatch.memory.reading import Quantity
from anybatch.memory.state import MemoryState, memory_of

from .standins import Allocator, Metal

MIB = 1 << 20
CPU = torch.device("cpu")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def figures(memory: MemoryState) -> dict[Quantity, int | None]:
    """What a state says, by quantity."""
    assert all(reading.source for reading in memory.readings)
    return {reading.quantity: reading.amount_bytes for reading in memory.readings}


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_allocator_counts_its_cache_as_to_be_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors hold 100 of 160 reserved bytes and the driver has 500 free: 660 of 1000 are to be had."""
    device = Allocator(100, 130, 160, 500, 1000).install(monkeypatch, kind)
    assert figures(memory_of(device)) == {
        Quantity.LIVE: 100,
        Quantity.PEAK: 130,
        Quantity.RESERVED: 160,
        Quantity.LIMIT: 1000,
        Quantity.BUDGET: 660,
    }
    assert memory_of(device).headroom_bytes == 560
    assert gauge_of(device).live_bytes() == 100
    assert memory_of(device).device == device


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_fraction_of_the_process_limits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have a quarter of 1000 bytes has a limit of 250, though more is free."""
    device = Allocator(100, 130, 160, 500, 1000, fraction=0.25).install(monkeypatch, kind)
    memory = memory_of(device)
    assert memory.limit.amount_bytes == memory.budget.amount_bytes == 250
    assert memory.limit.source.startswith("0.25 of ")
    assert memory_of(device).headroom_bytes == 150


def test_device_that_does_not_tell_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver can't tell, the limit is the budget, and its source says so."""
    device = Allocator(100, 130, 160, None, 1000).install(monkeypatch, "xpu")
    memory = memory_of(device)
    assert memory.limit.amount_bytes == memory.budget.amount_bytes == 1000
    assert "nobody tells what is free" in memory.budget.source


def test_metal_counts_what_its_driver_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal the driver's figure is live and reserved, what it recommends the limit; it keeps no peak."""
    device = Metal(driver_bytes=70, tensor_bytes=40, recommended_bytes=100).install(monkeypatch)
    assert figures(memory_of(device)) == {
        Quantity.LIVE: 70,
        Quantity.PEAK: None,
        Quantity.RESERVED: 70,
        Quantity.LIMIT: 100,
        Quantity.BUDGET: 100,
    }
    assert memory_of(device).headroom_bytes == 30


@pytest.mark.parametrize(
    ("free_bytes", "expected_bytes"), [(300, 900), (900, 1000)], ids=["others hold the rest", "nobody does"]
)
def test_host_budget(free_bytes: int, expected_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds 600 of 1000 bytes, 70 of them freed, gets these and what is free and allowed."""
    limit = HostLimit(1000, free_bytes, Currency.RESIDENT, "somebody")
    monkeypatch.setattr(state, "binding_limit", lambda: limit)
    monkeypatch.setattr(state.HostGauge, "live_bytes", lambda self: 600)
    monkeypatch.setattr(state, "reusable_bytes", lambda: 70)
    memory = memory_of(CPU)
    assert memory.live.amount_bytes == 600
    assert memory.limit.amount_bytes == 1000
    assert memory.budget.amount_bytes == expected_bytes
    assert memory_of(CPU).headroom_bytes == expected_bytes - 600 + 70


@linux_only
@pytest.mark.parametrize(
    ("currency", "live", "peak"),
    [
        (Currency.RESIDENT, "VmRSS", "VmHWM"),
        (Currency.DATA, "VmData", "VmPeak - (VmSize - VmData)"),
        (Currency.MAPPED, "VmSize", "VmPeak"),
    ],
)
def test_host_counts_as_its_limit_does(
    currency: Currency, live: str, peak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live and peak are in the currency of the limit that binds, and say so."""
    limit = HostLimit(1 << 40, 1 << 39, currency, "somebody")
    monkeypatch.setattr(state, "binding_limit", lambda: limit)
    monkeypatch.setattr(gauge, "binding_limit", lambda: limit)
    memory = memory_of(CPU)
    expected_bytes = read_status()[live]
    assert memory.live.amount_bytes == pytest.approx(expected_bytes, abs=MIB)
    assert live in memory.live.source
    assert memory.peak.source == peak
    assert gauge_of(CPU).live_bytes() == pytest.approx(expected_bytes, abs=MIB)


def test_host_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc (macOS, Windows) live, peak, limit and budget are still told."""
    monkeypatch.setattr("anybatch.memory.process.read_status", dict)
    monkeypatch.setattr("anybatch.memory.limit._process_limits", lambda: iter(()))
    monkeypatch.setattr("anybatch.memory.limit._group_limits", lambda: iter(()))
    memory = memory_of(CPU)
    assert memory.limit.amount_bytes == psutil.virtual_memory().total
    assert (memory.live.amount_bytes or 0) > MIB
    assert (memory.peak.amount_bytes or 0) > MIB
    assert memory.headroom_bytes is not None


def test_device_without_values() -> None:
    """The meta device holds nothing: no figures, and no gauge."""
    meta = torch.device("meta")
    assert set(figures(memory_of(meta)).values()) == {None}
    assert memory_of(meta).headroom_bytes is None
    with pytest.raises(ValueError, match="Got 'meta'"):
        gauge_of(meta).live_bytes()


def test_state_prints_every_figure_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state prints as a line for each figure, in binary units, with who says so."""
    device = Metal(driver_bytes=3 * MIB, tensor_bytes=MIB, recommended_bytes=7 * MIB).install(monkeypatch)
    assert str(memory_of(device)).splitlines() == [
        "memory of mps",
        "  in use now: 3.0 MiB (torch.mps.driver_allocated_memory)",
        "  most in use so far: none (nobody keeps it)",
        "  held, with caches: 3.0 MiB (torch.mps.driver_allocated_memory)",
        "  limit: 7.0 MiB (torch.mps.recommended_max_memory)",
        "  to be had: 7.0 MiB (the limit)",
    ]


UNDER_A_LIMIT = """
import torch
from anybatch.memory.limit import limit_growth
from anybatch.memory.state import memory_of
torch.set_num_threads(1)
cpu = torch.device("cpu")
torch.ones(1)
limit_growth(256 << 20)
free = memory_of(cpu).headroom_bytes
print(free >> 20, memory_of(cpu).limit.source)
def fits(size):
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True
print(fits(free - (1 << 20)), fits(free + (1 << 20)))
block = torch.ones(100 << 20, dtype=torch.uint8)
print((free - memory_of(cpu).headroom_bytes) >> 20)
"""


@linux_only
def test_headroom_is_what_really_fits() -> None:
    """Under a real limit a tensor 1 MiB smaller than the headroom fits, and one 1 MiB larger does not."""
    run = subprocess.run([sys.executable, "-c", UNDER_A_LIMIT], capture_output=True, text=True, check=True)
    first, fitting, grown = run.stdout.splitlines()
    assert int(first.split()[0]) == pytest.approx(256, abs=4)
    assert first.split()[1] == "RLIMIT_DATA"
    assert fitting.split() == ["True", "False"]
    assert int(grown) == pytest.approx(100, abs=2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_state_on_cuda() -> None:
    """A tensor of 64 MiB on a CUDA device raises live and peak; freed, only the peak stays."""
    device = torch.device("cuda", 0)
    begin_bytes = gauge_of(device).live_bytes()
    block = torch.ones(1 << 24, device=device)
    assert gauge_of(device).live_bytes() - begin_bytes == 64 * MIB
    del block
    memory = memory_of(device)
    assert memory.live.amount_bytes == begin_bytes
    assert (memory.peak.amount_bytes or 0) >= begin_bytes + 64 * MIB
    assert (memory.reserved.amount_bytes or 0) >= begin_bytes
    assert 0 < (memory.budget.amount_bytes or 0) <= (memory.limit.amount_bytes or 0)
