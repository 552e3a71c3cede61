"""Rows to try a loss on."""

from __future__ import annotations

import pytest

from anybatch.batch import balanced
from anybatch.exact.cuts import spread, straddle


@pytest.mark.parametrize("rows", [2, 3, 5, 9, 24, 100, 1000])
@pytest.mark.parametrize("ub_size", [1, 2, 3, 4, 7, 16, 64, 400])
def test_cuts_lie_in_the_mini_batch_and_are_halved_inside(rows: int, ub_size: int) -> None:
    """Each half has rows, and only a cut that is said to be wide has more than the largest piece, or two."""
    sizes = balanced(rows, ub_size)
    for index in range(len(sizes)):
        for cut in [*spread(sizes, index), *(straddle(sizes, index) if index else [])]:
            assert 0 <= cut.start < cut.middle < cut.stop <= rows
            assert cut.is_wide or sum(cut.rows) <= max(*sizes, 2)


def test_first_cut_of_a_large_piece_is_a_part_of_it() -> None:
    """What the probe costs stays below a piece: an eighth of many rows, all of few."""
    assert [sum(spread([n] * 4, 0)[0].rows) for n in (400, 100, 40, 16, 8)] == [50, 16, 16, 16, 8]


def test_cuts_of_three_and_two_rows_come_next() -> None:
    """They lie elsewhere than the first."""
    _, three, two, *_ = spread([8] * 8, 0)
    assert (three.rows, two.rows) == ((2, 1), (1, 1))
    assert three.start >= 8
    assert two.start >= 8


def test_straddle_joins_two_pieces_at_their_border() -> None:
    """The first cut is halved into the two pieces, the second has the rows of one."""
    both, narrow = straddle([4, 3, 3], 1)
    assert both.halves == ((0, 4), (4, 7))
    assert both.is_wide
    assert narrow.middle == 4
    assert sum(narrow.rows) == 3
