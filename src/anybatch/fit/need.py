"""What pieces need: bytes beyond those that are in use when a call begins, as a function of their rows."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, final

__all__ = ["Corrected", "Need", "PeakOfRows", "Unknown", "corrected"]

# The part of the need that memory which is there already, in malloc's own heap, is believed to have met.
_MOST_FOUND_RATIO = 0.15
# How far beyond a measured size the measure is trusted.
_FURTHEST_TIMES = 2
_NEAR_RATIO = 0.5
_NEAR_JUMP_RATIO = 0.75


class PeakOfRows(Protocol):
    """The most bytes of tensors that are alive at once while a piece of some rows is computed."""

    def peak_bytes(self, rows: int) -> int:
        """The peak for a piece of so many rows."""

    def largest_rows(self, budget_bytes: int) -> int:
        """The most rows whose peak is within so many bytes; 0 where not even one is."""


@final
@dataclass(frozen=True)
class Unknown:
    """Nothing is predicted: every size may fit."""

    def peak_bytes(self, rows: int) -> int:
        return 0

    def largest_rows(self, budget_bytes: int) -> int:
        return sys.maxsize


@final
@dataclass(frozen=True, eq=False)
class Corrected:
    """A prediction, and points at which it was found too low.

    Between two points the need is taken for a straight line, which lies above one that grows ever faster
    (with the square of rows, say); beyond the last one it goes on at twice that line's slope.
    """

    predicted: PeakOfRows
    points: tuple[tuple[int, int], ...]

    def peak_bytes(self, rows: int) -> int:
        return max(self.predicted.peak_bytes(rows), self._between(rows))

    def largest_rows(self, budget_bytes: int) -> int:
        return _largest(self.peak_bytes, budget_bytes, self.predicted.largest_rows(budget_bytes))

    def _between(self, rows: int) -> int:
        points = ((0, self.predicted.peak_bytes(0)), *self.points)
        for (low, low_bytes), (high, high_bytes) in pairwise(points):
            slope = (high_bytes - low_bytes) / (high - low)
            if rows <= high:
                return low_bytes + math.ceil(slope * (rows - low))
        return high_bytes + math.ceil(2 * slope * (rows - high))


def corrected(predicted: PeakOfRows, rows: int, peak_bytes: int) -> PeakOfRows:
    """The prediction, with what was found for one number of rows."""
    base, known = (
        (predicted.predicted, predicted.points) if isinstance(predicted, Corrected) else (predicted, ())
    )
    return Corrected(base, tuple(sorted({*known, (rows, peak_bytes)})))


def _largest(peak_bytes: Callable[[int], int], budget_bytes: int, most_rows: int) -> int:
    """The most rows, up to `most_rows`, whose peak is within a budget; the peak grows with the rows."""
    low, high = 0, most_rows
    while low < high:
        middle = (low + high + 1) // 2
        if peak_bytes(middle) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


@final
@dataclass(eq=False)
class Need:
    """What is predicted, and what was measured beyond.

    Attributes:
        tensors: What tensors need.
        expected: The same with what operators are expected to take beside them, until that is measured.
        hidden_bytes_per_row: What operators take beside tensors, as measured; below 0 where less was taken.
        size_bytes: What each new size of pieces keeps for good (prepared kernels); a cut has two sizes.
        penalty_bytes_per_row: What must be added where memory ran out although less was predicted.
        used_sizes: The rows of pieces that have run.
        measured_rows: The largest size of which it is known what it took.
    """

    tensors: PeakOfRows
    expected: PeakOfRows | None = None
    hidden_bytes_per_row: float = 0.0
    size_bytes: int = 0
    penalty_bytes_per_row: float = 0.0
    used_sizes: set[int] = field(default_factory=set)
    measured_rows: int = 0

    @property
    def is_bent(self) -> bool:
        """Was the prediction too low somewhere, so that it is not a straight line?"""
        return isinstance(self.tensors, Corrected)

    def peak_bytes(self, rows: int, sizes: int = 1) -> int:
        """What pieces of at most so many rows need, beyond what is in use, where they have so many sizes."""
        beside_bytes = max(self.hidden_bytes_per_row, self.penalty_bytes_per_row or -math.inf) * rows
        expected_bytes = 0 if self.expected is None or self.is_known(rows) else self.expected.peak_bytes(rows)
        new_bytes = 0 if rows in self.used_sizes else sizes * self.size_bytes
        return max(self.tensors.peak_bytes(rows), expected_bytes) + int(beside_bytes) + new_bytes

    def largest_rows(self, budget_bytes: int, most_rows: int) -> int:
        """The most rows, up to `most_rows`, that need no more than so many bytes; 0 where there is none."""
        return _largest(
            self.peak_bytes, budget_bytes, min(most_rows, self.tensors.largest_rows(budget_bytes))
        )

    @property
    def superfluous_bytes(self) -> int:
        """What sizes have kept beyond the first one: a process that kept to one size would have it, too."""
        return max(0, len(self.used_sizes) - 1) * self.size_bytes

    def see(
        self, sizes: Iterable[int], growth_bytes: int, kept_bytes: int, *, is_exact: bool = False
    ) -> None:
        """Takes note of what pieces of some sizes really took.

        Args:
            sizes: The rows of each piece.
            growth_bytes: The most bytes in use, beyond those in use before.
            kept_bytes: What stayed in use that no tensor holds.
            is_exact: Is the growth surely not more? Small tensors may have been given memory that was there.
        """
        rows, new = max(sizes), set(sizes) - self.used_sizes
        self.use(sizes)
        hidden_bytes = growth_bytes - self.tensors.peak_bytes(rows) - (kept_bytes if new else 0)
        least_bytes = -_MOST_FOUND_RATIO * self.tensors.peak_bytes(rows) if is_exact else 0.0
        self.hidden_bytes_per_row = max(least_bytes, hidden_bytes) / rows
        self.measured_rows = max(self.measured_rows, rows)
        if new:
            self.size_bytes = kept_bytes // len(new)

    def is_known(self, rows: int) -> bool:
        """Was a size measured that tells of this one?"""
        return 0 < rows <= _FURTHEST_TIMES * self.measured_rows

    def use(self, sizes: Iterable[int]) -> None:
        """Takes note that pieces of some sizes have run: what they keep is in use from now on."""
        self.used_sizes.update(sizes)

    def see_failure(self, rows: int, available_bytes: int) -> None:
        """Takes note that pieces of some rows do not fit into so many bytes."""
        missing_bytes = max(1, available_bytes + 1 - self.tensors.peak_bytes(rows))
        self.penalty_bytes_per_row = max(self.penalty_bytes_per_row, missing_bytes / rows)

    def rows_after_failure(self, rows: int, available_bytes: int) -> int:
        """The rows to try after pieces of some rows did not fit: well below, as creeping costs attempts.

        Where little of what there was should have been needed, nothing is known, and the rows are halved.
        """
        is_near = self.peak_bytes(rows) >= _NEAR_RATIO * available_bytes
        return int(rows * _NEAR_JUMP_RATIO) if is_near else rows // 2
