"""What is left to make good after all pieces: one ratio, or none."""

import pytest

from anybatch.exact import correction, shares
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.pattern import Pattern
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Kind, Term
from anybatch.exact.weights import Given

MEAN = TermLaw(Law.MEAN)
FOLLOWING = TermLaw(Law.MEAN, per_row=3.0, follows_rows=True)
SUM, ROWS, ONCE, GIVEN = (TermLaw(law) for law in (Law.SUM, Law.ROWS, Law.ONCE, Law.GIVEN))


def _pattern(*laws: TermLaw, roots: tuple[int, ...] | None = None) -> Pattern:
    """A pattern with one term for each law, all of one loss if nothing else is said."""
    roots = roots or (0,) * len(laws)
    terms = tuple(
        Term(root, (), f"Term{number}", Kind.ROWS)
        for number, root in zip(range(len(laws)), roots, strict=True)
    )
    known = {term.key: law for term, law in zip(terms, laws, strict=True)}
    return Pattern(terms, known, (None,) * (max(roots) + 1))


def _piece(
    pattern: Pattern, rows: int, *weights: float, masked: float = 1.0, given: float = 0
) -> PieceWeights:
    """A piece that divides by the given weights; where one is 0, by `masked`."""
    said = Given(Law.GIVEN, given) if given else None
    divisors = tuple(weight or masked for weight in weights)
    return PieceWeights(pattern, rows, weights, divisors, divisors, False, (said,) * pattern.losses)


def _ratio(laws: tuple[TermLaw, ...], counts: list[tuple[float, ...]], *expected: float) -> float | None:
    pattern = _pattern(*laws)
    pieces = [_piece(pattern, 4, *each) for each in counts]
    wanted = dict(zip((term.key for term in pattern.terms), expected, strict=True))
    return correction.common_ratio(pieces, wanted, shares.totals(pieces))


def test_ratio_is_expected_over_actual() -> None:
    """Ten were expected and eight came: gradients are a quarter too small."""
    assert _ratio((MEAN,), [(3.0,), (5.0,)], 10.0) == 10 / 8
    assert _ratio((MEAN, MEAN), [(3.0, 6.0), (5.0, 10.0)], 10.0, 20.0) == 10 / 8


def test_ratio_is_one_where_all_came_as_expected() -> None:
    """No multiplication where there is nothing to mend, and a sum has nothing to mend."""
    assert _ratio((MEAN, SUM), [(3.0, 1.0), (5.0, 1.0)], 8.0, 1.0) == 1.0


@pytest.mark.parametrize("expected", [(10.0, 10.0), (8.0, 10.0)])
def test_ratio_of_two_ratios_is_none(expected: tuple[float, float]) -> None:
    """Two terms that are off by different ratios can't be mended with one."""
    assert _ratio((MEAN, MEAN), [(3.0, 5.0), (5.0, 4.0)], *expected) is None


def test_ratio_of_a_mean_beside_a_sum_is_none() -> None:
    """The sum is right already; what mends the mean would spoil it."""
    assert _ratio((MEAN, SUM), [(3.0, 1.0), (5.0, 1.0)], 10.0, 1.0) is None


def test_ratio_of_nothing_is_none() -> None:
    """Where nothing counted, only counting first gives torch's own result."""
    assert _ratio((MEAN,), [(0.0,), (0.0,)], 10.0) is None


def test_has_other_sum_names_the_piece() -> None:
    """A sum over a hundred that is one over fifty in the third piece is no sum."""
    pattern = _pattern(SUM)
    pieces = [_piece(pattern, 4, divisor) for divisor in (100.0, 100.0, 50.0)]
    assert correction.has_other_sum(pieces) == 2
    assert correction.has_other_sum(pieces[:2]) is None


@pytest.mark.parametrize(("seeds", "ratio", "adds_up"), [((0.25, 0.25), 2, True), ((0.25, 0.25), 1, False)])
def test_sums_to_one_after_the_ratio(seeds: tuple[float, ...], ratio: float, adds_up: bool) -> None:
    """A weight decay that went in by quarters, twice, is whole after all gradients are doubled."""
    piece = _piece(_pattern(ONCE), 4, 1.0)
    assert correction.sums_to_one([piece, piece], [(seed,) for seed in seeds], ratio, 1e-12) is adds_up


def test_sums_to_one_looks_at_each_loss_and_at_terms_that_go_in_once() -> None:
    """Means have no sum of seeds to keep, and each loss has seeds of its own."""
    mean = _piece(_pattern(MEAN), 4, 1.0)
    assert correction.sums_to_one([mean, mean], [(0.2,), (0.2,)], 1.0, 1e-12)
    two = _piece(_pattern(MEAN, ONCE, roots=(0, 1)), 4, 1.0, 1.0)
    assert correction.sums_to_one([two, two], [(0.2, 0.5), (0.2, 0.5)], 1.0, 1e-12)
    assert not correction.sums_to_one([two, two], [(0.5, 0.2), (0.5, 0.2)], 1.0, 1e-12)


def test_sums_to_one_where_some_pieces_lack_the_term() -> None:
    """The pieces that have a term share it among themselves."""
    pattern, without = _pattern(MEAN, ONCE), _pattern(MEAN)
    pieces = [_piece(pattern, 4, 1.0, 1.0), _piece(without, 4, 1.0), _piece(pattern, 4, 1.0, 1.0)]
    assert not correction.sums_to_one(pieces, [(1 / 3,)] * 3, 1.0, 1e-12)
    assert correction.sums_to_one(pieces, [(1 / 2,)] * 3, 1.0, 1e-12)


@pytest.mark.parametrize(
    ("law", "weights", "index"),
    [
        (FOLLOWING, (12.0, 12.0, 9.0), None),
        (FOLLOWING, (12.0, 8.0, 9.0), 1),
        (FOLLOWING, (12.0, 12.0, 12.0), 2),
        (MEAN, (3.0, 1.0, 2.0), None),
        (TermLaw(Law.SUM, constant=100.0), (100.0, 100.0, 100.0), None),
        (TermLaw(Law.SUM, constant=100.0), (100.0, 50.0, 100.0), 1),
        (TermLaw(Law.SUM, constant=100.0), (100.0, 0.0, 100.0), None),
        (ROWS, (1.0, 2.0, 3.0), None),
    ],
)
def test_departure_is_the_first_piece_that_divides_by_something_else(
    law: TermLaw, weights: tuple[float, ...], index: int | None
) -> None:
    """Three per row in pieces of 4, 4 and 3 rows, or a hundred in all; counts may be what they are."""
    pattern = _pattern(law)
    pieces = [_piece(pattern, rows, weight) for rows, weight in zip((4, 4, 3), weights, strict=True)]
    assert correction.departure(pieces) == index
