"""What this process holds in the host's memory, as the operating system counts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import final

import psutil

__all__ = [
    "Currency",
    "HighWater",
    "HostCounter",
    "Touched",
    "data_bytes",
    "high_water",
    "live_of",
    "read_status",
    "read_status_of",
]

_STATUS = Path("/proc/self/status")
_STATM = "/proc/self/statm"


class Currency(Enum):
    """A way in which the system counts what a process holds. Each limit is kept in one of them."""

    DATA = "data (VmData)"
    MAPPED = "mapped (VmSize)"
    RESIDENT = "resident (VmRSS)"


@final
@dataclass(frozen=True)
class HighWater:
    """The most that was ever held.

    Attributes:
        amount_bytes: How much.
        mark_bytes: The mark from which that is known: a new peak was reached when this one rose.
        source: Who keeps the mark.
    """

    amount_bytes: int
    mark_bytes: int
    source: str


@final
@dataclass(frozen=True)
class Touched:
    """Memory of this process that was written to, of which the kernel keeps the exact peak.

    Attributes:
        now_bytes: In use now, without what is read from files.
        files_bytes: What is read from files: libraries.
        mark_bytes: The most of both that there ever was (VmHWM).
    """

    now_bytes: int
    files_bytes: int
    mark_bytes: int

    @classmethod
    def read(cls) -> Touched | None:
        """As it is now; None where the system does not tell."""
        status = read_resident()
        if status is None:
            return None
        return cls(*status)

    def growth_bytes(self, end: Touched) -> int:
        """How much more was in use at a peak since then; 0 where an earlier peak hides it.

        Error: as much as pages of files went out of use after the peak.
        """
        return end.mark_bytes - end.files_bytes - self.now_bytes if end.mark_bytes > self.mark_bytes else 0


# Where a currency stands in /proc/self/statm, in pages. The data there hold the main thread's stack as well.
_STATM_FIELDS = {Currency.MAPPED: 0, Currency.RESIDENT: 1, Currency.DATA: 5}
_STATUS_NAMES = {Currency.MAPPED: "VmSize", Currency.RESIDENT: "VmRSS", Currency.DATA: "VmData"}
_NAMES_OF = {
    Currency.MAPPED: ("VmPeak", "VmSize"),
    Currency.RESIDENT: ("VmHWM", "VmRSS"),
    Currency.DATA: ("VmPeak", "VmSize", "VmData"),
}
_ALL_NAMES = ("VmPeak", "VmSize", "VmHWM", "VmRSS", "VmData", "VmStk")


@final
class HostCounter:
    """Reads again and again what this process holds, in one currency; about 1 microsecond each on Linux.

    Error: for data, as much as the main thread's stack has grown since the counter was made. Off Linux
    the resident bytes stand in for every currency.
    """

    def __init__(self, currency: Currency) -> None:
        self._currency = currency
        self._field = _STATM_FIELDS[currency]
        status = read_status()
        self._extra_bytes = status["VmStk"] if currency is Currency.DATA and status else 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if status else 0
        self._process = None if status else psutil.Process()
        self._file, self._pid = -1, -1

    def __reduce__(self) -> tuple[type[HostCounter], tuple[Currency]]:
        """A copy is made anew: it must not share what this one has open."""
        return HostCounter, (self._currency,)

    def __call__(self) -> int:
        if self._process is not None:
            return int(self._process.memory_info().rss)
        # In a forked child the open file would go on telling of the parent.
        if self._pid != os.getpid():
            self._reopen()
        fields = os.pread(self._file, 256, 0).split()
        return int(fields[self._field]) * self._page_bytes - self._extra_bytes

    def __del__(self) -> None:
        self._close()

    def _reopen(self) -> None:
        self._close()
        self._file, self._pid = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC), os.getpid()

    def _close(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)
            self._file = -1


def read_status(path: Path = _STATUS) -> Mapping[str, int]:
    """The figures of /proc/self/status by name (`"VmRSS"`), in bytes; empty on systems without that file."""
    return _figures(os.fspath(path), _ALL_NAMES)


def read_status_of(currency: Currency) -> Mapping[str, int]:
    """The same, of the figures that tell of one currency only: it is read often."""
    return _figures(os.fspath(_STATUS), _NAMES_OF[currency])


def _figures(path: str, names: Iterable[str]) -> Mapping[str, int]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return {}
    try:
        text = os.read(file, 1 << 16)
    finally:
        os.close(file)
    found = {}
    for name in names:
        begin = text.find(f"\n{name}:".encode())
        if begin >= 0:
            found[name] = int(text[begin + len(name) + 2 : text.find(b" kB", begin)]) * 1024
    return found


def live_of(status: Mapping[str, int], currency: Currency) -> int:
    """What a process with this status holds."""
    return status[_STATUS_NAMES[currency]]


def read_resident(path: Path = _STATUS) -> tuple[int, int, int] | None:
    """Resident bytes without those of files, those of files, and the most of both so far."""
    if not path.exists():
        return None
    found = dict(
        line.split(":", 1) for line in path.read_text().splitlines() if line.startswith(("Rss", "VmHWM"))
    )
    if not {"RssAnon", "RssFile", "VmHWM"} <= found.keys():
        return None
    anonymous, files, mark = (int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM"))
    return anonymous, files, mark


def data_bytes() -> int:
    """Bytes that RLIMIT_DATA counts now: private writable memory, touched or not.

    Off Linux, where that limit does not count mapped memory, the resident bytes stand in for it.
    """
    status = read_status()
    return status["VmData"] if status else psutil.Process().memory_info().rss


def high_water(currency: Currency, status: Mapping[str, int] | None = None) -> HighWater:
    """The most that this process has held so far, by its status, which is read where it is not given.

    The kernel keeps no mark for data, but one for everything mapped (VmPeak). What is not data (code, files,
    reserved address space) hardly changes once the libraries are loaded, and is subtracted.

    Error: for data, as much as that part has grown since the peak.
    """
    status = read_status() if status is None else status
    if not status:
        peak_bytes = _portable_peak_bytes()
        return HighWater(peak_bytes, peak_bytes, "peak resident (operating system)")
    if currency is Currency.RESIDENT:
        return HighWater(status["VmHWM"], status["VmHWM"], "VmHWM")
    mark_bytes = status["VmPeak"]
    if currency is Currency.MAPPED:
        return HighWater(mark_bytes, mark_bytes, "VmPeak")
    other_bytes = status["VmSize"] - status["VmData"]
    return HighWater(mark_bytes - other_bytes, mark_bytes, "VmPeak - (VmSize - VmData)")


def _portable_peak_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
