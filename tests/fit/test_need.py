"""Tests of `anybatch.fit.need`."""

from dataclasses import dataclass

import pytest

from anybatch.fit.need import Need, PeakOfRows, corrected


@dataclass(frozen=True)
class Line:
    """A need of so many bytes, and so many per row."""

    fixed_bytes: int
    row_bytes: int

    def peak_bytes(self, rows: int) -> int:
        """The need of a piece."""
        return self.fixed_bytes + self.row_bytes * rows

    def largest_rows(self, budget_bytes: int) -> int:
        """The rows within a budget."""
        return max(0, (budget_bytes - self.fixed_bytes) // self.row_bytes)


def test_need_is_that_of_tensors_before_anything_is_measured() -> None:
    """The first size follows from the prediction alone."""
    need = Need(Line(1000, 10))
    assert need.peak_bytes(7) == 1070
    assert need.largest_rows(1099, 100) == 9
    assert need.largest_rows(5000, 100) == 100
    assert need.largest_rows(999, 100) == 0


def test_hidden_bytes_count_by_row() -> None:
    """What operators took beside tensors is expected of other sizes in proportion to their rows."""
    need = Need(Line(1000, 10))
    need.see([10], 1000 + 100 + 50, 0)
    assert need.peak_bytes(20) == 1000 + 200 + 100
    assert need.largest_rows(1000 + 15 * 20, 100) == 20


def test_less_than_predicted_changes_nothing() -> None:
    """A call that took less may have taken it elsewhere: the prediction stands."""
    need = Need(Line(1000, 10))
    need.see([10, 9], 900, 0)
    assert need.peak_bytes(10) == 1100


def test_less_than_predicted_counts_where_it_is_exact() -> None:
    """A high-water mark below the prediction counts: small tensors found memory. 15 % of it are believed."""
    need = Need(Line(0, 10))
    need.see([10], 90, 0, is_exact=True)
    assert need.peak_bytes(20) == 180
    need = Need(Line(0, 10))
    need.see([10], 10, 0, is_exact=True)
    assert need.peak_bytes(20) == 170


def test_what_a_new_size_keeps_is_expected_of_the_next_one() -> None:
    """A size that was used needs nothing more; another keeps as much again."""
    need = Need(Line(0, 10))
    need.see([10], 100 + 30, 30)
    assert need.peak_bytes(10) == 100
    assert need.peak_bytes(11) == 110 + 30
    assert need.peak_bytes(11, sizes=2) == 110 + 2 * 30
    assert need.hidden_bytes_per_row == 0
    assert need.superfluous_bytes == 0
    need.use([11])
    assert need.superfluous_bytes == 30


@pytest.mark.parametrize("rows", [2, 3, 10, 1000])
def test_failure_makes_the_size_too_large(rows: int) -> None:
    """After a failure its size no longer fits into what there was, and the next is well below."""
    need = Need(Line(0, 10))
    available_bytes = 10 * rows
    assert rows // 2 <= need.rows_after_failure(rows, available_bytes) <= 0.75 * rows
    need.see_failure(rows, available_bytes)
    assert need.largest_rows(available_bytes, 10_000) < rows


def test_failure_that_nothing_explains_halves() -> None:
    """Where there should have been plenty, the prediction says nothing."""
    assert Need(Line(0, 10)).rows_after_failure(1000, 1 << 40) == 500


@pytest.mark.parametrize("rows", [3, 10, 47, 100, 150])
def test_correction_lies_above_what_grows_ever_faster(rows: int) -> None:
    """Points of a square, and straight lines between them: never less than the square, and equal at them."""
    need: PeakOfRows = Line(0, 10)
    for point in (100, 50):
        need = corrected(need, point, point**2)
    assert need.peak_bytes(50) == 2500
    assert need.peak_bytes(100) == 10_000
    assert need.peak_bytes(rows) >= min(rows**2, 10_000) if rows <= 100 else need.peak_bytes(rows) > 10_000
    assert need.largest_rows(10_000) == 100


def test_single_row_that_fails_leaves_none() -> None:
    """Below one row there is nothing."""
    assert Need(Line(0, 10)).rows_after_failure(1, 1000) == 0
