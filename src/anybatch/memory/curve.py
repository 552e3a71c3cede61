"""The peak of a step as a function of its rows, from two symbolic runs: lines, one per operator."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from anybatch.memory.trace import Trace

__all__ = ["Confirmation", "Curve", "confirmed", "fit_curve", "largest_confirmed_rows"]

# One row is no base: batch norms refuse it, and kernels and squeezed shapes differ.
_BASE_ROWS = (2, 3)
# What two runs of one program at one size may differ by, by when memory is given back.
_AGREES_RATIO = 0.002
_MOST_RUNS = 16


@final
@dataclass(frozen=True, eq=False)
class Curve:
    """Bytes alive at each event of a step, each an affine function of the rows.

    Only lines that are the highest for some number of rows, one or more, are kept.

    Error: exact where every storage's size is affine in the rows; `confirmed` tells where it isn't.

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


@final
@dataclass(frozen=True)
class Confirmation:
    """What one more symbolic run says of a curve.

    Attributes:
        rows: Rows of the run.
        expected_bytes: The peak by the curve.
        seen_bytes: The peak of the run.
    """

    rows: int
    expected_bytes: int
    seen_bytes: int

    @property
    def agrees(self) -> bool:
        """Is the curve right there, but for 0.2 % of it?"""
        return abs(self.seen_bytes - self.expected_bytes) <= _AGREES_RATIO * self.expected_bytes


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


def confirmed(curve: Curve, run: Callable[[int], Trace], rows: int) -> Confirmation:
    """Runs once more, at the rows about to be chosen. A symbolic run costs the same at any size."""
    return Confirmation(rows, curve.peak_bytes(rows), run(rows).peak_bytes)


def largest_confirmed_rows(
    curve: Curve, run: Callable[[int], Trace], budget_bytes: int, most_rows: int
) -> tuple[int, int, str]:
    """The most rows within a budget, as a run at that very size confirms.

    Where the curve is wrong (matrices of rows by rows, padding to multiples), symbolic runs close in on the
    answer; it is then that of a bracket: the rows fit, and the next larger size that was tried does not.

    Args:
        curve: The curve of the step.
        run: Traces a step of so many rows.
        budget_bytes: What the peak of the trace must not exceed.
        most_rows: The most rows worth asking about, at least one.

    Returns:
        The rows, 0 where not even one is within; the peak at these rows (of one row, where it is 0), as
        traced; and how it was found.
    """
    guess = min(curve.largest_rows(budget_bytes), most_rows)
    first = confirmed(curve, run, max(1, guess))
    fits = first.seen_bytes <= budget_bytes
    if fits and (first.agrees or guess == most_rows) and guess >= 1:
        return guess, first.seen_bytes, "the curve, confirmed"
    return _Bracket(curve, run, budget_bytes, most_rows).close_in(first)


class _Bracket:
    """Closes in on the largest rows that fit: some that fit below, some that don't above."""

    def __init__(self, curve: Curve, run: Callable[[int], Trace], budget_bytes: int, most_rows: int) -> None:
        self._run = run
        self._budget_bytes = budget_bytes
        self._most_rows = most_rows
        self._low = 0
        self._high: int | None = None
        # The curve's own runs are runs, too.
        bases = [rows for rows in _BASE_ROWS if curve.is_aligned and rows <= most_rows]
        self._peaks = {rows: curve.peak_bytes(rows) for rows in bases}
        for rows in self._peaks:
            self._narrow(rows)
        self._runs = 0
        self._was_outside = False

    def close_in(self, first: Confirmation) -> tuple[int, int, str]:
        self._place(first.rows, first.seen_bytes)
        while self._runs < _MOST_RUNS and not self._is_closed():
            rows = self._next_rows()
            self._place(rows, self._run(rows).peak_bytes)
        return self._answer()

    def _place(self, rows: int, peak_bytes: int) -> None:
        self._runs += 1
        self._peaks[rows] = peak_bytes
        self._narrow(rows)

    def _narrow(self, rows: int) -> None:
        if self._peaks[rows] <= self._budget_bytes:
            self._low = max(self._low, rows)
        else:
            self._high = rows if self._high is None else min(self._high, rows)

    def _is_closed(self) -> bool:
        return self._low >= self._most_rows if self._high is None else self._high - self._low <= 1

    def _next_rows(self) -> int:
        least = self._low + 1
        most = self._most_rows if self._high is None else self._high - 1
        guess = self._by_power_law()
        is_outside = not least <= guess <= most
        # Halving closes in on anything; a power of the rows, which most programs follow, is faster.
        halves = (is_outside and self._was_outside) or self._runs % 4 == 0
        self._was_outside = is_outside and not halves
        return _middle(least, most) if halves else min(max(guess, least), most)

    def _by_power_law(self) -> int:
        """Where the budget is reached by the power of the rows that goes through the two nearest peaks."""
        goal = math.log(max(1, self._budget_bytes))
        points = [(math.log(rows), math.log(max(1, peak))) for rows, peak in self._peaks.items()]
        nearest = sorted(points, key=lambda point: abs(point[1] - goal))[:2]
        if len(nearest) < 2 or nearest[0][1] == nearest[1][1]:
            return 2 * self._low
        (x, y), (other_x, other_y) = nearest
        exponent = (y - other_y) / (x - other_x)
        return int(math.exp(min(x + (goal - y) / exponent, math.log(self._most_rows))))

    def _answer(self) -> tuple[int, int, str]:
        how = f"{self._runs} symbolic runs"
        if self._high is not None:
            how += f": {self._high} rows do not fit"
        return self._low, self._peaks[self._low or self._high or 1], how


def _middle(least: int, most: int) -> int:
    """The middle between two sizes: by their ratio where it is large, so that orders of magnitude go fast."""
    return math.isqrt(least * most) if most > 2 * least else (least + most) // 2


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
