"""What this process holds in the host's memory, as the operating system counts it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from anybatch.memory.reading import Quantity, Reading

__all__ = ["data_bytes", "peak_data_bytes", "process_readings", "read_status"]

_STATUS = Path("/proc/self/status")


def process_readings() -> tuple[Reading, ...]:
    """Live and peak bytes of this process, each with its source, in every way that this system counts them.

    On Linux, resident bytes (VmRSS, VmHWM) are what a container's limit counts, and data bytes (VmData) what
    RLIMIT_DATA counts.
    """
    status = read_status()
    if not status:
        return _portable_readings()
    return (
        Reading(Quantity.LIVE, status["VmRSS"], "resident (VmRSS)"),
        Reading(Quantity.PEAK, status["VmHWM"], "resident (VmHWM)"),
        Reading(Quantity.LIVE, status["VmData"], "data (VmData)"),
    )


def read_status(path: Path = _STATUS) -> Mapping[str, int]:
    """The figures of /proc/self/status by name (`"VmRSS"`), in bytes; empty on systems without that file."""
    if not path.exists():
        return {}
    lines = (line.split() for line in path.read_text().splitlines() if line.startswith("Vm"))
    return {name.rstrip(":"): int(kibibytes) * 1024 for name, kibibytes, _ in lines}


def data_bytes() -> int:
    """Bytes that RLIMIT_DATA counts now: private writable memory, touched or not.

    Off Linux, where that limit does not count mapped memory, the resident bytes stand in for it.
    """
    status = read_status()
    return status["VmData"] if status else psutil.Process().memory_info().rss


def peak_data_bytes() -> int:
    """The largest `data_bytes()` of this process so far.

    The kernel keeps no high-water mark for it, but one for everything mapped (VmPeak). What is not data
    (code, files, reserved address space) hardly changes once the libraries are loaded, and is subtracted.

    Error: as much as that part has grown since the peak.
    """
    status = read_status()
    if not status:
        return _portable_peak_bytes()
    return status["VmPeak"] - (status["VmSize"] - status["VmData"])


def _portable_readings() -> tuple[Reading, ...]:
    live_bytes = psutil.Process().memory_info().rss
    return (
        Reading(Quantity.LIVE, live_bytes, "resident (psutil)"),
        Reading(Quantity.PEAK, _portable_peak_bytes(), "resident (operating system)"),
    )


def _portable_peak_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
