"""The peak of a step as a function of its rows, from two symbolic runs: lines, one per operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from anybatch.memory.trace import Trace

__all__ = ["Curve", "fit_curve"]

# One row is no base: batch norms refuse it, and kernels and squeezed shapes differ.
_BASE_ROWS = (2, 3)


@final
@dataclass(frozen=True, eq=False)
class Curve:
    """Bytes alive at each event of a step, each an affine function of the rows.

    Only lines that are the highest for some number of rows, one or more, are kept.

    Error: exact where every storage's size is affine in the rows; a run of another size tells where it isn't.

    Attributes:
        fixed_bytes: Of each line: bytes at no rows, int64.
        row_bytes: Of each line: bytes per row, int64, rising.
        events: Of each line: what it is, in words.
        is_aligned: Did the operators of both runs correspond? If not, there is one line, through the peaks.
    """

    fixed_bytes: npt.NDArray[np.int64]
    row_bytes: npt.NDArray[np.int64]
    events: tuple[str, ...]
    is_aligned: bool = True

    def peak_bytes(self, rows: int) -> int:
        """The most bytes that are alive at once in a step of so many rows, at least one."""
        return int((self.fixed_bytes + self.row_bytes * rows).max())

    def at(self, rows: int) -> str:
        """The event that has the peak in a step of so many rows: operator, label and phase."""
        return self.events[int((self.fixed_bytes + self.row_bytes * rows).argmax())]

    def largest_rows(self, budget_bytes: int) -> int:
        """The most rows whose peak is within so many bytes.

        Returns:
            The rows; 0 where not even one row is within; `sys.maxsize` where no number of rows is too large.
        """
        grows = self.row_bytes > 0
        room_bytes = budget_bytes - self.fixed_bytes[grows]
        rows = int((room_bytes // self.row_bytes[grows]).min()) if grows.any() else sys.maxsize
        if rows == sys.maxsize:
            return rows if int(self.fixed_bytes.max()) <= budget_bytes else 0
        return rows if rows >= 1 and self.peak_bytes(rows) <= budget_bytes else 0


def fit_curve(run: Callable[[int], Trace]) -> Curve:
    """The curve of a step, from one run of two rows and one of three.

    Args:
        run: Traces a step of so many rows. Both traces must begin at the same state of memory.

    Returns:
        The curve. Where the two runs do not take the same operators (a loop over rows), it is the line
        through their peaks, and `is_aligned` is False.
    """
    small, large = (run(rows) for rows in _BASE_ROWS)
    if small.operators != large.operators:
        return _line_through_peaks(small, large)
    row_bytes = (large.live_bytes - small.live_bytes) // (_BASE_ROWS[1] - _BASE_ROWS[0])
    fixed_bytes = small.live_bytes - row_bytes * _BASE_ROWS[0]
    highest = _highest_lines(fixed_bytes, row_bytes)
    return Curve(fixed_bytes[highest], row_bytes[highest], tuple(small.describe(event) for event in highest))


def _line_through_peaks(small: Trace, large: Trace) -> Curve:
    low, high = _BASE_ROWS
    row_bytes = (large.peak_bytes - small.peak_bytes) // (high - low)
    fixed_bytes = small.peak_bytes - row_bytes * low
    return Curve(
        np.array([fixed_bytes]), np.array([row_bytes]), (large.describe(large.peak_event),), is_aligned=False
    )


def _highest_lines(fixed_bytes: npt.NDArray[np.int64], row_bytes: npt.NDArray[np.int64]) -> list[int]:
    """Indices of the lines that are the highest for some rows, at least one, by rising slope."""
    order = np.lexsort((-fixed_bytes, row_bytes))
    is_first = np.concatenate(([True], np.diff(row_bytes[order]) > 0))
    highest: list[int] = []
    for line in order[is_first].tolist():
        while highest and _is_hidden(fixed_bytes, row_bytes, highest, line):
            highest.pop()
        highest.append(line)
    return highest


def _is_hidden(
    fixed_bytes: npt.NDArray[np.int64], row_bytes: npt.NDArray[np.int64], highest: list[int], line: int
) -> bool:
    """Is the last line nowhere above both the one before it and a steeper one?"""
    last = highest[-1]
    a, b = int(fixed_bytes[last]), int(row_bytes[last])
    steep_a, steep_b = int(fixed_bytes[line]), int(row_bytes[line])
    if steep_a + steep_b >= a + b:
        return True
    if len(highest) < 2:
        return False
    flat_a, flat_b = int(fixed_bytes[highest[-2]]), int(row_bytes[highest[-2]])
    return (flat_a - steep_a) * (b - flat_b) <= (flat_a - a) * (steep_b - flat_b)
