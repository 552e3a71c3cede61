"""Tests of `anybatch.fit.pace`."""

from anybatch.fit.pace import Pace


def settle(rates_rows_per_s: dict[int, float], most_rows: int = 64, least_rows: int = 1) -> tuple[int, int]:
    """Runs calls until nothing is left to try; returns the divisor and the number of calls."""
    pace, calls = Pace(), 0
    while not pace.is_settled(most_rows, least_rows):
        divisor = pace.divisor(most_rows, least_rows)
        pace.see(divisor, 100, 100 / rates_rows_per_s[divisor])
        calls += 1
    return pace.divisor(most_rows, least_rows), calls


def test_largest_size_stays_where_halving_does_not_pay() -> None:
    """One smaller size is tried, and left."""
    assert settle({1: 100.0, 2: 101.0}) == (1, 6)


def test_smaller_sizes_are_tried_as_long_as_that_pays() -> None:
    """The fastest of sizes that get faster and then slower is found."""
    assert settle({1: 100.0, 2: 120.0, 4: 130.0, 8: 90.0}) == (4, 12)


def test_number_of_sizes_is_bounded() -> None:
    """An eighth is the smallest that is tried."""
    assert settle({1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}) == (8, 12)


def test_sizes_below_the_least_are_not_tried() -> None:
    """BatchNorm's minimum, and single rows, are left out."""
    assert settle({1: 1.0, 2: 2.0}, most_rows=8, least_rows=4) == (2, 6)
    assert settle({1: 1.0}, most_rows=3) == (1, 3)


def test_first_call_of_a_size_is_not_timed() -> None:
    """It prepares kernels: a slow first call says nothing of the size."""
    pace = Pace()
    for duration_s in (50.0, 1.0, 2.0):
        pace.see(1, 100, duration_s)
    assert pace.best(1) == 100.0
