"""Curves from made-up traces, against the same formulas in plain Python."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anybatch.memory.curve import fit_curve
from anybatch.memory.trace import Trace

Lines = list[tuple[int, int]]


def _trace(amounts: list[int]) -> Trace:
    names = tuple(f"event {index}" for index in range(len(amounts)))
    return Trace(names, np.array(amounts, dtype=np.int64))


def _affine(lines: Lines) -> Callable[[int], Trace]:
    return lambda rows: _trace([fixed + slope * rows for fixed, slope in lines])


lines_of_steps = st.lists(st.tuples(st.integers(0, 10**6), st.integers(-50, 10**4)), min_size=1, max_size=30)


@given(lines_of_steps, st.integers(1, 10**5))
def test_peak_is_that_of_the_highest_line(lines: Lines, rows: int) -> None:
    """At any number of rows, the peak and its event are those of the largest of all lines."""
    curve = fit_curve(_affine(lines))
    amounts = [fixed + slope * rows for fixed, slope in lines]
    assert curve.peak_bytes(rows) == max(amounts)
    assert amounts[int(curve.at(rows).split()[1])] == max(amounts)


@given(lines_of_steps, st.integers(0, 10**8))
def test_largest_rows_is_the_last_that_fits(lines: Lines, budget_bytes: int) -> None:
    """The closed form gives rows that are within the budget, and one more is not."""

    def peak(rows: int) -> int:
        return max(fixed + slope * rows for fixed, slope in lines)

    rows = fit_curve(_affine(lines)).largest_rows(budget_bytes)
    if rows == sys.maxsize:
        assert all(slope <= 0 for _, slope in lines)
    elif rows == 0:
        grows_to = (
            max((budget_bytes - fixed) // slope for fixed, slope in lines if slope > 0)
            if any(slope > 0 for _, slope in lines)
            else 1
        )
        assert all(peak(each) > budget_bytes for each in range(1, min(max(grows_to, 1), 1000) + 1))
    else:
        assert peak(rows) <= budget_bytes < peak(rows + 1)


def test_bases_are_two_and_three_rows() -> None:
    """A curve costs two runs, and never one of a single row."""
    sizes: list[int] = []

    def step(rows: int) -> Trace:
        sizes.append(rows)
        return _trace([10 * rows])

    fit_curve(step)
    assert sizes == [2, 3]


def test_dominated_events_are_dropped() -> None:
    """Events that are never the highest are not kept."""
    curve = fit_curve(_affine([(100, 1), (90, 1), (0, 10), (50, 5), (1, 2)]))
    assert curve.events == ("event 0", "event 2")
    assert fit_curve(_affine([(100, 1), (99, 10)])).events == ("event 1",)


def test_event_that_is_highest_for_a_few_rows_is_kept() -> None:
    """At 10 rows 110, 120 and 100 bytes: the middle line has the peak, which neither other one has."""
    curve = fit_curve(_affine([(100, 1), (70, 5), (0, 10)]))
    assert curve.events == ("event 0", "event 1", "event 2")
    assert [curve.peak_bytes(rows) for rows in (1, 10, 100)] == [101, 120, 1000]


def test_runs_that_take_other_operators_give_the_line_through_their_peaks() -> None:
    """A loop over rows has other operators for each size: what is left are the peaks."""
    curve = fit_curve(lambda rows: _trace([7] * rows + [100 * rows]))
    assert not curve.is_aligned
    assert curve.peak_bytes(10) == 1000
