"""The peak of a block: by a mark that rose, or by samples."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from anybatch.memory.gauge import gauge_of
from anybatch.memory.peak import PeakMeter

from .standins import Allocator, Metal, Scripted

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
MIB = 1 << 20


def test_mark_that_rose_is_the_peak() -> None:
    """A mark that rises to 90 during a block that begins at 10 and ends at 20 says that the peak was 90."""
    gauge = Scripted(10, 50)
    with PeakMeter(gauge, sample_s=0) as meter:
        gauge.held_bytes, gauge.mark_bytes = 20, 90
    assert (meter.begin_bytes, meter.end_bytes, meter.peak_bytes, meter.growth_bytes) == (10, 20, 90, 80)
    assert meter.is_exact or meter.is_marked
    assert meter.source == "a mark"


@pytest.mark.parametrize("mark_bytes", [500, None], ids=["an earlier peak", "no mark at all"])
def test_samples_where_no_mark_rose(mark_bytes: int | None) -> None:
    """A block whose peak an earlier one hides, as a warm-up's does, is measured by samples; it says so."""
    gauge = Scripted(10, mark_bytes)
    with PeakMeter(gauge) as meter:
        gauge.held_bytes = 90
        gauge.wait_for_sample()
        gauge.held_bytes = 20
    assert (meter.begin_bytes, meter.end_bytes, meter.peak_bytes) == (10, 20, 90)
    assert not meter.is_exact
    assert meter.source == "samples of a script"


def test_mark_that_somebody_reset_is_not_believed() -> None:
    """A mark that fell was reset during the block: what was sampled counts, and it is said."""
    gauge = Scripted(10, 500)
    with PeakMeter(gauge) as meter:
        gauge.held_bytes = 90
        gauge.wait_for_sample()
        gauge.held_bytes, gauge.mark_bytes = 30, 30
    assert meter.peak_bytes == 90
    assert not meter.is_exact


@pytest.mark.parametrize(("begin", "end"), [(70, 10), (10, 70)])
def test_peak_is_no_less_than_begin_and_end(begin: int, end: int) -> None:
    """Without a single sample the peak is at least what was in use at the begin and at the end."""
    gauge = Scripted(begin, None)
    with PeakMeter(gauge, sample_s=0) as meter:
        gauge.held_bytes = end
    assert meter.peak_bytes == 70


def test_sampling_stops_with_the_block() -> None:
    """After the block, also one that fails, no thread of the meter is left; the meter can be used again."""
    gauge, threads = Scripted(10, None), threading.active_count()
    meter = PeakMeter(gauge)

    def fail() -> None:
        with meter:
            gauge.held_bytes = 30
            gauge.wait_for_sample()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert threading.active_count() == threads
    assert meter.peak_bytes == 30
    gauge.held_bytes = 5
    with meter:
        gauge.wait_for_sample()
    assert (meter.begin_bytes, meter.peak_bytes) == (5, 5)
    assert threading.active_count() == threads


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_peak_on_an_accelerator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's own peak is taken where it rose, and no counter is reset."""
    allocator = Allocator(live_bytes=10, peak_bytes=40, total_bytes=100)
    device = allocator.install(monkeypatch, kind)
    with PeakMeter(device) as meter:
        allocator.peak_bytes = 70
    assert (meter.peak_bytes, meter.is_exact) == (70, True)
    assert "max_memory_allocated" in meter.source
    with PeakMeter(device) as meter:
        allocator.live_bytes = 20
    assert (meter.peak_bytes, meter.is_exact) == (20, False)


def test_peak_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal keeps no peak: what its driver holds is sampled."""
    metal = Metal(driver_bytes=10, recommended_bytes=100)
    with PeakMeter(metal.install(monkeypatch)) as meter:
        metal.driver_bytes = 60
    assert (meter.peak_bytes, meter.is_exact) == (60, False)
    assert "driver_allocated_memory" in meter.source


BLOCKS = """
import json, sys, threading, torch
from anybatch.memory.gauge import HostGauge
from anybatch.memory.peak import PeakMeter
from anybatch.memory.process import Currency
torch.set_num_threads(1)
gauge = HostGauge(Currency[sys.argv[1]])
def block(mib):
    with PeakMeter(gauge) as meter:
        tensor = torch.ones(mib << 20, dtype=torch.uint8)
        for _ in range(300):
            tensor[:1 << 16].sum()
        tensor.sum(dtype=torch.uint8)
        del tensor
    return [meter.growth_bytes, meter.end_bytes - meter.begin_bytes, meter.is_exact or meter.is_marked]
block(1)
print(json.dumps([block(300), block(200), block(310)]))
"""


@linux_only
@pytest.mark.parametrize("currency", ["DATA", "RESIDENT", "MAPPED"])
def test_peak_of_real_blocks(currency: str) -> None:
    """300 MiB raise the mark, 200 MiB hide below it and are sampled, 310 MiB raise it again."""
    command = [sys.executable, "-c", BLOCKS, currency]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    blocks = json.loads(run.stdout)
    for (growth_bytes, kept_bytes, _), expected_mib in zip(blocks, (300, 200, 310), strict=True):
        assert growth_bytes == pytest.approx(expected_mib * MIB, abs=20 * MIB)
        assert kept_bytes == pytest.approx(0, abs=20 * MIB)
    assert [is_exact for _, _, is_exact in blocks] == [True, False, True]


def test_gauge_is_chosen_where_a_device_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device stands for the gauge of the limit that binds there."""
    device = Metal(driver_bytes=10, recommended_bytes=100).install(monkeypatch)
    assert PeakMeter(device, sample_s=0).__enter__().begin_bytes == gauge_of(device).live_bytes() == 10
