"""Tests of `anybatch.fit.budget`."""

from typing import Any

import pytest

from anybatch.fit.budget import bytes_of, check_amount


@pytest.mark.parametrize(
    ("amount", "expected_bytes"),
    [
        (0, 0),
        (123, 123),
        ("6GiB", 6 * 1024**3),
        ("1.5 KiB", 1536),
        ("2MB", 2_000_000),
        ("7b", 7),
        ("1tib", 1024**4),
        (0.25, 250),
        (1.0, 1000),
    ],
)
def test_amounts_in_bytes(amount: Any, expected_bytes: int) -> None:
    """Bytes, numbers with a unit, and fractions of what there is."""
    assert bytes_of(amount, 1000, "budget") == expected_bytes


def test_fraction_of_what_is_not_known() -> None:
    """A fraction of nothing known is not known."""
    assert bytes_of(0.5, None, "budget") is None


@pytest.mark.parametrize("amount", [-1, True, 0.0, -0.5, 1.5, float("nan"), "6", "6 apples", "GiB", [], None])
def test_what_is_no_amount_is_refused(amount: Any) -> None:
    """The error names the option and what was given."""
    with pytest.raises(ValueError, match="margin"):
        check_amount(amount, "margin")
