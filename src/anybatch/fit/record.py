"""What is known of calls of one kind whose rows have one shape, and the size that follows from it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from anybatch.fit.need import Need
from anybatch.fit.pace import Pace
from anybatch.fit.room import Room
from anybatch.memory.shadow import OptimizerCost

__all__ = ["Record"]

# The first size stays below what is predicted, for what operators take beside tensors is not known yet.
_NOTHING = OptimizerCost(0, 0)
_FIRST_RATIO = 0.88
# A size that ran out of memory is tried again after so many calls, then after twice as many, and so on.
_LEAST_PATIENCE_CALLS = 16


@final
@dataclass(eq=False)
class Record:
    """One kind of call, and one shape of rows.

    Attributes:
        title: The function, and what its calls have in common, for people.
        extent: The shape of a row.
        need: What pieces need.
        how: Where the prediction of the need comes from.
        is_foreseen: Is it a prediction, and not a guess?
        first_ratio: The part of the predicted size that the first call uses.
        has_gaps: Does malloc keep what is freed in pieces, into which only the same size fits again?
        pace: How fast the sizes are that were tried.
        ceiling_rows: The most rows that fit, as far as is known, where a process keeps to one size.
        limit_rows: The most rows that are used: less than the ceiling where that makes no difference.
        rows: The size that was used last; 0 before the first call.
        reason: Why that size.
        room: What there was at the last call.
        step: What the optimizer's step takes.
        sums_bytes: What sums of gradients take, where there are so many pieces that they are added up apart.
        confirmed_rows: The largest size at which the prediction was compared with a run of that size.
        is_measured: Has a call been measured?
        failures: How often memory ran out.
    """

    title: str
    extent: tuple[int, ...]
    need: Need
    how: str
    is_foreseen: bool = False
    first_ratio: float = _FIRST_RATIO
    has_gaps: bool = False
    pace: Pace = field(default_factory=Pace)
    ceiling_rows: int = 0
    limit_rows: int = 0
    rows: int = 0
    reason: str = ""
    room: Room | None = None
    step: OptimizerCost = _NOTHING
    sums_bytes: int = 0
    confirmed_rows: int = 0
    is_measured: bool = False
    failures: int = 0
    _confirmed_last: int = 0
    _calls_to_wait: int = 0
    _patience_calls: int = _LEAST_PATIENCE_CALLS // 2
    _most_after_failure: int | None = None

    @property
    def available_bytes(self) -> int | None:
        """What there was for pieces at the last call; None where nothing can tell."""
        if self.room is None or self.room.available_bytes is None:
            return None
        return max(0, self.room.available_bytes - self.step.state_bytes - self.sums_bytes)

    def fit(self, rows: int, most_rows: int) -> int:
        """The most rows of a piece, for a mini-batch of so many rows.

        It changes only where the old size no longer fits, or where fewer pieces would do: each new size of
        pieces costs memory and preparation.
        """
        fitting_rows = self._fitting_rows()
        self.ceiling_rows = min(most_rows, self._fitting_rows(self.need.superfluous_bytes))
        first_rows = int(fitting_rows * self.first_ratio)
        is_cautious = not self.need.is_known(min(rows, fitting_rows)) and first_rows < rows
        new_rows = self._cuttable(rows, min(most_rows, first_rows if is_cautious else fitting_rows))
        if not self._keeps(rows, new_rows):
            self.limit_rows = new_rows
        return self.limit_rows

    def _cuttable(self, rows: int, most_rows: int) -> int:
        """The size of the fewest pieces that fit, of at most so many rows: an uneven cut has two sizes."""
        pieces = _pieces(rows, most_rows)
        if pieces == 1 or self.available_bytes is None:
            return most_rows
        while rows % pieces and pieces < rows:
            size = _pieces(rows, pieces)
            if self.need.peak_bytes(size, sizes=2) <= self.available_bytes:
                break
            pieces += 1
        return min(most_rows, _pieces(rows, pieces))

    def _fitting_rows(self, more_bytes: int = 0) -> int:
        """The most rows that fit by all that is known, into what there is and some bytes more."""
        if self.available_bytes is None:
            return self._most_after_failure or sys.maxsize
        rows = self.need.largest_rows(self.available_bytes + more_bytes, sys.maxsize)
        return min(rows, self._most_after_failure or rows)

    def _keeps(self, rows: int, new_rows: int) -> bool:
        if not (self.limit_rows and self.is_measured) or self._exceeds(self.limit_rows):
            return False
        return self.has_gaps or _pieces(rows, new_rows) >= _pieces(rows, self.limit_rows)

    def _exceeds(self, rows: int) -> bool:
        # What an allocation found no gap for was measured, too, and is there the next time.
        need = self.need.tensors if self.has_gaps else self.need
        return self.available_bytes is not None and need.peak_bytes(rows) > self.available_bytes

    def is_confirmed(self, rows: int) -> bool:
        """Was the prediction compared with a run of so many rows, or of more where it is a straight line?"""
        return rows == self._confirmed_last or (rows <= self.confirmed_rows and not self.need.is_bent)

    def see_confirmation(self, rows: int) -> None:
        """Takes note that the prediction has been compared with a run of so many rows."""
        self._confirmed_last = rows
        self.confirmed_rows = max(self.confirmed_rows, rows)

    def see_success(
        self, sizes: Sequence[int], growth_bytes: int, kept_bytes: int, *, is_exact: bool
    ) -> None:
        """Takes note of what a call took that was measured."""
        self.need.see(sizes, growth_bytes, kept_bytes, is_exact=is_exact and not self.has_gaps)
        self.is_measured = True

    def see_call(self, sizes: Sequence[int]) -> None:
        """Takes note of a call that went through, in pieces of some sizes."""
        self.need.use(sizes)
        if self._calls_to_wait:
            self._calls_to_wait -= 1
            if not self._calls_to_wait:
                self._forget_failure()

    def _forget_failure(self) -> None:
        """Lets the next call try what failed: others may have given memory back."""
        self._most_after_failure = None
        self.need.penalty_bytes_per_row = 0.0
        self.limit_rows = 0

    def see_failure(self, rows: int) -> int:
        """Takes note that pieces of some rows ran out of memory; returns the rows to try next, maybe 0."""
        self.failures += 1
        if not self._calls_to_wait:
            self._patience_calls *= 2
        self._calls_to_wait = self._patience_calls
        if self.available_bytes is None:
            next_rows = rows // 2
        else:
            next_rows = self.need.rows_after_failure(rows, self.available_bytes)
            self.need.see_failure(next_rows + 1, self.available_bytes)
        self.limit_rows = self.ceiling_rows = self._most_after_failure = next_rows
        return next_rows


def _pieces(rows: int, most_rows: int) -> int:
    """How many pieces of so many rows, or fewer; and how many rows in so many pieces, or fewer."""
    return -(-rows // max(most_rows, 1))
