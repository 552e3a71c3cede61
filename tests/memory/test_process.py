"""What a process holds in the host's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import anybatch.memory.process as process
from anybatch.memory.process import data_bytes, peak_data_bytes, process_readings, read_status
from anybatch.memory.reading import Quantity

MIB = 1 << 20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

HOLD_300_MIB = """
import json, torch
from anybatch.memory.process import data_bytes, peak_data_bytes, read_status
torch.set_num_threads(1)
def figures():
    return [data_bytes(), peak_data_bytes(), read_status()["VmRSS"], read_status()["VmHWM"]]
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
    status.write_text("Name:\tpython\nVmRSS:\t    1234 kB\nVmData:\t 5 kB\nThreads:\t3\n")
    assert read_status(status) == {"VmRSS": 1234 * 1024, "VmData": 5 * 1024}


def test_read_status_without_proc(tmp_path: Path) -> None:
    """A system without /proc has an empty status."""
    assert read_status(tmp_path / "status") == {}


def test_readings_name_quantity_and_source() -> None:
    """Live and peak are told apart, each with a source; the peak is no less than what is live."""
    readings = process_readings()
    live = [each for each in readings if each.quantity is Quantity.LIVE]
    peak = [each for each in readings if each.quantity is Quantity.PEAK]
    assert live
    assert peak
    assert all(each.source for each in readings)
    assert (peak[0].amount_bytes or 0) >= (live[0].amount_bytes or 0) > MIB


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
    assert peak_data_bytes() == 7000 * unit_bytes
    assert [each.amount_bytes for each in process_readings()][1] == 7000 * unit_bytes
    assert data_bytes() > MIB
