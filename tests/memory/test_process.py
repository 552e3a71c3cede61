"""What a process holds in the host's memory."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anybatch.memory.process as process
from anybatch.memory.process import (
    Currency,
    HighWater,
    HostCounter,
    data_bytes,
    high_water,
    read_status,
)

MIB = 1 << 20
STATUS_NAMES = {Currency.DATA: "VmData", Currency.MAPPED: "VmSize", Currency.RESIDENT: "VmRSS"}
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

HOLD_300_MIB = """
import json, torch
from anybatch.memory.process import Currency, data_bytes, high_water, read_status
torch.set_num_threads(1)
def figures():
    peak_bytes = high_water(Currency.DATA).amount_bytes
    return [data_bytes(), peak_bytes, read_status()["VmRSS"], read_status()["VmHWM"]]
before = figures()
block = torch.ones(300 * (1 << 20), dtype=torch.uint8)
held = figures()
del block
print(json.dumps([before, held, figures()]))
"""


@linux_only
def test_peak_stays_and_live_returns() -> None:
    """A block of 300 MiB raises live and peak by 300 MiB; freed, live returns and peak stays."""
    result = subprocess.run([sys.executable, "-c", HOLD_300_MIB], capture_output=True, text=True, check=True)
    before, held, after = json.loads(result.stdout)
    size = pytest.approx(300 * MIB, abs=20 * MIB)
    for live, peak in ((0, 1), (2, 3)):
        assert held[live] - before[live] == size
        assert after[live] - before[live] == pytest.approx(0, abs=20 * MIB)
        assert after[peak] - before[live] == size


def test_read_status_in_bytes(tmp_path: Path) -> None:
    """The file's KiB become bytes, and lines about anything else are left out."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t    1234 kB\nVmData:\t       5 kB\nThreads:\t3\n")
    assert read_status(status) == {"VmRSS": 1234 * 1024, "VmData": 5 * 1024}


def test_read_status_without_proc(tmp_path: Path) -> None:
    """A system without /proc has an empty status."""
    assert read_status(tmp_path / "status") == {}


@linux_only
def test_counter_agrees_with_the_status() -> None:
    """The cheap way to read and the readable one tell the same, in every currency, within 1 MiB."""
    for currency, name in STATUS_NAMES.items():
        count = HostCounter(currency)
        assert count() == pytest.approx(read_status()[name], abs=MIB)


@linux_only
@pytest.mark.parametrize("currency", list(Currency))
def test_counter_sees_a_block(currency: Currency) -> None:
    """A block of 300 MiB raises what is held by 300 MiB, however it is counted, and goes again."""
    count = HostCounter(currency)
    begin_bytes = count()
    block = torch.ones(300 * MIB, dtype=torch.uint8)
    held_bytes = count() - begin_bytes
    del block
    assert held_bytes == pytest.approx(300 * MIB, abs=20 * MIB)
    assert count() - begin_bytes == pytest.approx(0, abs=20 * MIB)


@linux_only
def test_high_water_is_no_less_than_what_is_held() -> None:
    """The most that was held so far is at least what is held now, and comes with the mark that says so."""
    for currency in Currency:
        most = high_water(currency)
        assert most.amount_bytes >= HostCounter(currency)() - MIB
        assert "Vm" in most.source


def test_high_water_of_data_leaves_out_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything mapped at the peak (100), what is no data now (80 - 50) is subtracted."""
    monkeypatch.setattr(process, "read_status", lambda: {"VmPeak": 100, "VmSize": 80, "VmData": 50})
    assert high_water(Currency.DATA) == HighWater(70, 100, "VmPeak - (VmSize - VmData)")
    assert high_water(Currency.MAPPED) == HighWater(100, 100, "VmPeak")


@pytest.mark.skipif(sys.platform == "win32", reason="simulates macOS and other Unix systems")
@pytest.mark.parametrize(("platform", "unit_bytes"), [("darwin", 1), ("freebsd", 1024)])
def test_readings_without_proc(platform: str, unit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc the peak is the operating system's, whose unit is bytes on macOS and KiB elsewhere."""
    import resource

    class Usage:
        ru_maxrss = 7000

    monkeypatch.setattr(process, "read_status", dict)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: Usage)
    assert all(high_water(currency).amount_bytes == 7000 * unit_bytes for currency in Currency)
    assert data_bytes() > MIB
    assert all(HostCounter(currency)() > MIB for currency in Currency)


@linux_only
def test_forked_child_counts_itself() -> None:
    """A counter that a child inherits reads the child: what it takes shows there, and not in the parent."""
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert int(run.stdout) == pytest.approx(100 << 20, abs=8 << 20)


FORKED = """
import mmap, os
from anybatch.memory.process import Currency, HostCounter
count = HostCounter(Currency.DATA)
count()
if os.fork() == 0:
    before = count()
    block = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    print(count() - before, flush=True)
    os._exit(0)
os.wait()
"""


def test_copy_of_a_counter_has_a_file_of_its_own() -> None:
    """A copy that is dropped leaves the counter that it was made of as it was."""
    counter = HostCounter(Currency.RESIDENT)
    before = counter()
    copied = copy.deepcopy(counter)
    assert abs(copied() - before) < 64 << 20
    del copied
    assert abs(counter() - before) < 64 << 20
    assert abs(pickle.loads(pickle.dumps(counter))() - before) < 64 << 20
