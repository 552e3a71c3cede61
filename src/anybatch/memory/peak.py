"""The most bytes in use during a block, without resetting anybody's counters."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

import torch

from anybatch.memory.gauge import Gauge, HostGauge, gauge_of
from anybatch.memory.process import HighWater, Touched
from anybatch.memory.sampler import Sampler

__all__ = ["PeakMeter"]


@final
class PeakMeter:
    """Measures the most bytes that this process has in use on a device during a `with` block.

    Where a high-water mark of the system's or the allocator's rose during the block, the peak is that mark.
    Else an earlier peak hides that of the block, and the figure is the largest that a thread met, which
    reads what is in use about every millisecond, with what is in use at the begin and at the end.

    Error: none where a mark rose (on a host, see `memory.process.high_water`); sampled, what lasts less
    than a millisecond may be missed. The samples cost about 1 % of one core.

    Attributes:
        begin_bytes: In use at the begin.
        end_bytes: In use at the end.
        peak_bytes: Most in use in between; during the block, what is known so far.
        source: Who says what `peak_bytes` is.
        is_exact: Is it a high-water mark?
        is_marked: Is it at least a high-water mark of what was written to?

    Example:
        >>> with PeakMeter(torch.device("cpu")) as meter:
        ...     block = torch.ones(1 << 25)
        >>> meter.growth_bytes > 1 << 26
        True
    """

    def __init__(self, device: torch.device | Gauge, sample_s: float = 0.001) -> None:
        """Prepares to measure.

        Args:
            device: The device, or a gauge of it: that of the limit that binds, where not said.
            sample_s: Seconds between two samples; 0 for none.
        """
        self._gauge = device if isinstance(device, Gauge) else gauge_of(device)
        self._sampler = Sampler(self._sample, sample_s)
        self._sampled_bytes = 0
        self._begin: HighWater | None = None
        self._touched: Touched | None = None
        self.begin_bytes = self.end_bytes = self.peak_bytes = 0
        self.source = "not measured"
        self.is_exact = self.is_marked = False

    @property
    def growth_bytes(self) -> int:
        """How much more was in use at the peak than at the begin."""
        return self.peak_bytes - self.begin_bytes

    def __enter__(self) -> Self:
        self._sampler.start()
        self._begin = self._gauge.high_water()
        self._touched = self._gauge.touched()
        self.begin_bytes = self._sampled_bytes = self.peak_bytes = self._gauge.live_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sampler.stop()
        self.end_bytes = self._gauge.live_bytes()
        touched_bytes = self.begin_bytes + self._touched_growth_bytes()
        self.is_marked = touched_bytes > self.begin_bytes
        self._read(max(self._sampled_bytes, self.begin_bytes, self.end_bytes, touched_bytes))

    def _touched_growth_bytes(self) -> int:
        """What was written to at the peak, beyond what was at the begin: all of it is in use."""
        end = self._gauge.touched()
        return 0 if end is None or self._touched is None else self._touched.growth_bytes(end)

    def _sample(self) -> None:
        self._sampled_bytes = max(self._sampled_bytes, self._gauge.live_bytes())

    def _read(self, seen_bytes: int) -> None:
        end = self._gauge.high_water()
        if self.is_marked and isinstance(self._gauge, HostGauge):
            # Each new thread lifts the mark of all that is mapped by 64 MiB that nobody writes to.
            self.peak_bytes, self.source = seen_bytes, f"VmHWM, and samples of {self._gauge.source}"
        elif end is not None and self._begin is not None and end.mark_bytes > self._begin.mark_bytes:
            self.is_exact = True
            self.peak_bytes, self.source = max(end.amount_bytes, seen_bytes), end.source
        else:
            self.is_exact = False
            self.peak_bytes, self.source = seen_bytes, f"samples of {self._gauge.source}"
