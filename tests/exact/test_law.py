"""The law of a term, P(A and B) = P(A) + P(B) - c0, from a piece and its halves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anybatch.exact.law import Law, NoLaw, TermLaw, common, of_constants, of_denominators, of_values
from anybatch.exact.reading import Reading, follow
from anybatch.exact.terms import Kind, Term

ROUNDING = 1e-13


def _reading(denominator: float, *vectors: Tensor, is_masked: bool = False) -> Reading:
    """What a piece says of a term that divides by the given number."""
    root = torch.ones(2, requires_grad=True).sum().grad_fn
    assert root is not None
    read = follow(Term(0, (), "SumBackward0", Kind.ROWS), root)
    return replace(read, denominator=denominator, is_masked=is_masked, vectors=vectors)


def _law(whole: float, halves: tuple[float, float], rows: tuple[int, int] = (3, 2)) -> TermLaw:
    return of_denominators(_reading(whole), [_reading(half) for half in halves], rows, ROUNDING)


def _mean(whole: float, per_row: float, follows_rows: bool) -> TermLaw:
    """The law of a mean without an epsilon, known up to the rounding error of the whole's denominator."""
    return TermLaw(Law.MEAN, 0, per_row, follows_rows, c0_error=ROUNDING * whole)


def test_denominators_that_follow_the_rows_are_a_mean_known_beforehand() -> None:
    """Fifteen elements in five rows are three per row, for any rows."""
    assert _law(15, (9, 6)) == _mean(15, per_row=3, follows_rows=True)


def test_denominators_that_count_are_a_mean() -> None:
    """Counts that add up but don't follow the rows are a mean, to be counted."""
    assert _law(5, (1, 4)) == _mean(5, per_row=1, follows_rows=False)


def test_denominators_with_an_epsilon_are_a_mean_with_an_offset() -> None:
    """An epsilon below the count stands in each half, so twice, and once in the whole."""
    law = _law(5 + 1e-6, (1 + 1e-6, 4 + 1e-6))
    assert law.law is Law.MEAN
    assert law.c0 == pytest.approx(1e-6, rel=1e-6)


def test_denominators_that_never_change_are_a_sum() -> None:
    """A sum over a hundred is a sum, whatever the rows."""
    assert _law(100, (100, 100)) == TermLaw(Law.SUM, constant=100)


@pytest.mark.parametrize(("whole", "halves"), [(25, (9, 4)), (10, (6, 3.5)), (3, (3, 1)), (3, (3, 0.5))])
def test_denominators_that_do_not_add_up_have_no_law(whole: float, halves: tuple[float, float]) -> None:
    """The square of the rows, half a count, or halves that may be clamped have no law."""
    with pytest.raises(NoLaw, match="does not add up over rows"):
        _law(whole, halves)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_large_offset_is_a_law_where_three_cuts_find_it(count: int) -> None:
    """One more than a count adds up but for one in every cut; the root of the rows does so in none."""
    offsets = [_law(total, halves) for total, halves in ((11, (4, 8)), (7, (5, 3)), (21, (11, 11)))]
    if count < 3:
        with pytest.raises(NoLaw, match="does not add up over rows"):
            common(offsets[:count])
    else:
        assert common(offsets).c0 == 1
    roots = [_law((m + n) ** 0.5, (m**0.5, n**0.5)) for m, n in ((3, 2), (2, 1), (5, 3))]
    with pytest.raises(NoLaw):
        common(roots[:count])


def test_denominators_of_a_masked_half_are_left_out() -> None:
    """A half in which nothing counts divides by the 1 of a clamp, which is no count."""
    halves = [_reading(4), _reading(1, is_masked=True)]
    expected = replace(_mean(4, 4 / 5, follows_rows=False), counts_all=False)
    assert of_denominators(_reading(4), halves, (3, 2), ROUNDING) == expected


def test_denominators_of_a_masked_half_count_rows() -> None:
    """A half in which nothing counts divides by its rows, where the piece divides by the rows of both."""
    halves = [_reading(3), _reading(2, is_masked=True)]
    expected = replace(_mean(5, per_row=1, follows_rows=True), counts_all=True)
    assert of_denominators(_reading(5), halves, (3, 2), ROUNDING) == expected
    nothing = [_reading(3, is_masked=True), _reading(2, is_masked=True)]
    assert of_denominators(_reading(5, is_masked=True), nothing, (3, 2), ROUNDING).counts_all is None


def test_common_law_keeps_what_one_cut_shows_of_masked_rows() -> None:
    """Cuts without rows of which nothing counts say nothing of what these bring."""
    plain, seen = _mean(5, 1, follows_rows=True), replace(_mean(5, 1, follows_rows=True), counts_all=True)
    assert common([seen, plain]).counts_all is True
    assert common([plain, replace(seen, counts_all=False)]).counts_all is False
    assert common([plain, plain]).counts_all is None


def test_vectors_that_differ_have_no_law() -> None:
    """Per-class fractions of a piece multiply its terms with other values in each piece."""
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    same = [_reading(3, ones), _reading(2, ones)]
    assert of_denominators(_reading(5, ones), same, (3, 2), ROUNDING).law is Law.MEAN
    with pytest.raises(NoLaw, match="differ from piece to piece"):
        of_denominators(_reading(5, ones), [_reading(3, ones), _reading(2, twos)], (3, 2), ROUNDING)


def test_common_law_prefers_a_mean_to_a_sum() -> None:
    """Halves with equal counts by chance look like a sum; one cut where they differ says what it is."""
    mean = TermLaw(Law.MEAN, per_row=0.5, follows_rows=False)
    assert common([TermLaw(Law.ROWS), TermLaw(Law.ROWS)]) == TermLaw(Law.ROWS)
    assert common([TermLaw(Law.SUM), mean]) == mean


def test_common_law_follows_rows_only_if_every_cut_does() -> None:
    """A cut with uneven counts shows that the rows don't tell the denominator."""
    one, two = (TermLaw(Law.MEAN, per_row=1.0, follows_rows=follows) for follows in (True, False))
    assert common([one, one]).follows_rows
    assert not common([one, two]).follows_rows
    assert not common([two, one]).follows_rows


def test_common_law_of_two_rates_keeps_the_last() -> None:
    """Pieces are measured against the rate of the last cut, so that those of another one are looked at."""
    one, two = (TermLaw(Law.MEAN, per_row=rate, follows_rows=True) for rate in (1.0, 2.0))
    assert common([one, two]) == two


@pytest.mark.parametrize(
    ("halves", "whole", "law"),
    [((1.0, 6.0), 3.0, Law.ROWS), ((1.0, 6.0), 7.0, Law.SUM), ((1.0, 6.0), 3.5, None)],
)
def test_values_combine_by_rows_or_as_a_sum(halves: tuple[float, ...], whole: float, law: Law | None) -> None:
    """Three rows of value 1 and two of value 6 have the mean 3 and the sum 7; the plain average is no law."""
    assert of_values(whole, halves, (3, 2), 1e-9) is law


def test_constants_that_stay_the_same_count_once() -> None:
    """A weight decay with a fixed coefficient is the same for every piece."""
    readings = [_reading(1, torch.tensor(0.1)) for _ in range(3)]
    assert of_constants(readings[0], readings[1:], (3, 2)) == TermLaw(Law.ONCE)


@pytest.mark.parametrize(("whole", "law"), [(3.0, Law.ROWS), (7.0, Law.SUM)])
def test_constants_from_data_combine_like_values(whole: float, law: Law) -> None:
    """A coefficient computed from the piece's rows is a mean or a sum over them."""
    halves = [_reading(1, torch.tensor(value)) for value in (1.0, 6.0)]
    assert of_constants(_reading(1, torch.tensor(whole)), halves, (3, 2)).law is law


def test_constants_that_combine_in_no_way_have_no_law() -> None:
    """A coefficient that is neither is refused, as are two that change at once."""
    one, six, odd, three = (torch.tensor(value) for value in (1.0, 6.0, 3.5, 3.0))
    with pytest.raises(NoLaw):
        of_constants(_reading(1, odd), [_reading(1, one), _reading(1, six)], (3, 2))
    with pytest.raises(NoLaw):
        of_constants(_reading(1, three, three), [_reading(1, one, one), _reading(1, six, six)], (3, 2))


def test_common_law_of_means_with_other_constants_is_none() -> None:
    """A constant that changes from cut to cut is none."""
    laws = [TermLaw(Law.MEAN, c0=c0, c0_error=1e-9) for c0 in (1e-4, 2e-4)]
    assert common([laws[0], laws[0]]).c0 == 1e-4
    with pytest.raises(NoLaw, match="only nearly"):
        common(laws)


def test_denominators_that_add_up_but_for_rounding_have_no_epsilon() -> None:
    """What is left over within the rounding error of the denominators is no constant."""
    whole, halves = _reading(6), [_reading(3 + 1e-7), _reading(3)]
    assert of_denominators(whole, halves, (3, 3), rounding=1e-6).c0 == 0.0
    assert of_denominators(whole, halves, (3, 3), rounding=1e-9).c0 == pytest.approx(1e-7, rel=1e-6)
