"""Factors of pieces: what each term's denominators come to over the mini-batch, and each piece's share."""

import math
from dataclasses import replace

import pytest

from anybatch.exact import shares
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


def _totals(*pieces: PieceWeights) -> list[float]:
    return list(shares.totals(pieces).values())


def test_total_of_a_mean_is_the_sum_of_counts() -> None:
    """Counts add up."""
    pattern = _pattern(MEAN)
    assert _totals(_piece(pattern, 4, 3.0), _piece(pattern, 3, 5.0)) == [8.0]


def test_total_adds_counts_up_as_they_were_before_their_clamp() -> None:
    """A piece without positives divides by 1 and adds nothing; nothing in all pieces divides by 1 too."""
    pattern = _pattern(MEAN)
    empty = replace(_piece(pattern, 4, 1.0), amounts=(0.0,))
    assert _totals(_piece(pattern, 4, 3.0), empty, _piece(pattern, 4, 1.0)) == [4.0]
    assert _totals(empty, empty) == [1.0]


def test_total_takes_an_epsilon_once() -> None:
    """Each of three pieces has the epsilon in its denominator, the whole has it once."""
    pattern = _pattern(TermLaw(Law.MEAN, c0=0.25))
    pieces = [_piece(pattern, 4, count + 0.25) for count in (3.0, 5.0, 1.0)]
    assert _totals(*pieces) == [9.25]


def test_total_leaves_out_the_clamp_of_a_masked_piece() -> None:
    """A piece in which nothing counts divides by the 1 of a clamp, which is no count."""
    pattern = _pattern(MEAN)
    assert _totals(_piece(pattern, 4, 3.0), _piece(pattern, 4, 0.0)) == [3.0]


def test_total_keeps_the_epsilon_of_a_masked_piece() -> None:
    """A piece in which nothing counts has the epsilon too."""
    pattern = _pattern(TermLaw(Law.MEAN, c0=1e-6))
    masked = _piece(pattern, 4, 0.0, masked=1e-6)
    assert _totals(_piece(pattern, 4, 3.0 + 1e-6), masked) == [pytest.approx(3 + 1e-6, rel=1e-12)]


def test_total_is_zero_where_nothing_counts_anywhere() -> None:
    """All masked: the total is 0, and every factor 1, for torch's own result."""
    pattern = _pattern(MEAN)
    pieces = [_piece(pattern, 4, 0.0), _piece(pattern, 4, 0.0)]
    assert _totals(*pieces) == [0.0]
    assert shares.factors(pieces[0], shares.totals(pieces)) == (1.0,)


def test_total_of_rows_of_weights_and_of_pieces() -> None:
    """Rows and the caller's weights add up; what goes in once divides by the pieces that have it."""
    pattern = _pattern(ROWS, ONCE)
    assert _totals(_piece(pattern, 4, 1.0, 1.0), _piece(pattern, 3, 1.0, 1.0)) == [7.0, 2.0]
    weighted = _pattern(GIVEN)
    assert _totals(_piece(weighted, 4, 1.0, given=2.5), _piece(weighted, 3, 1.0, given=0.5)) == [3.0]


def test_factors_are_shares_of_the_totals() -> None:
    """A mean has its share of the count, rows of the rows, a sum the factor 1, what goes in once a third."""
    pattern = _pattern(MEAN, ROWS, SUM, ONCE)
    pieces = [_piece(pattern, rows, count, 1.0, 1.0, 1.0) for rows, count in ((4, 2.0), (3, 5.0), (3, 1.0))]
    assert shares.factors(pieces[0], shares.totals(pieces)) == (2 / 8, 4 / 10, 1.0, 1 / 3)


def test_factors_that_differ_by_rounding_are_one() -> None:
    """Terms with the same factor up to rounding share one, and need no hooks."""
    pattern = _pattern(MEAN, MEAN)
    pieces = [_piece(pattern, 4, 0.1, 0.1 * (1 + 1e-16)), _piece(pattern, 4, 0.2, 0.3 - 0.1)]
    first, second = shares.factors(pieces[0], shares.totals(pieces))
    assert first == second


def test_expected_totals_are_known_from_rows() -> None:
    """Before anything runs: three per row, the rows, the caller's weight of the whole, the pieces."""
    pattern = _pattern(FOLLOWING, ROWS, ONCE)
    assert list(shares.expected_totals(pattern, 10, 3, [None]).values()) == [30.0, 10.0, 3.0]
    (weight,) = shares.expected_totals(_pattern(GIVEN), 10, 3, [Given(Law.GIVEN, 7.5)]).values()
    assert weight == 7.5


def test_in_exact_factors_divides_counts_by_powers_of_two() -> None:
    """The first total becomes the next power of two, the others keep their ratio to it."""
    pattern = _pattern(FOLLOWING, ROWS)
    whole = dict(zip((term.key for term in pattern.terms), (30.0, 10.0), strict=True))
    first, second = shares.in_exact_factors(pattern, whole).values()
    assert first == 32.0
    assert second == pytest.approx(10 * 32 / 30, rel=1e-15)


def test_in_exact_factors_leaves_sums_alone() -> None:
    """A sum has the factor 1, which no common scale may change."""
    pattern = _pattern(FOLLOWING, SUM)
    whole = dict(zip((term.key for term in pattern.terms), (30.0, 1.0), strict=True))
    assert shares.in_exact_factors(pattern, whole) == whole


@pytest.mark.parametrize(
    ("laws", "needs"),
    [
        ((MEAN,), False),
        ((MEAN, MEAN), False),
        ((MEAN, ONCE), False),
        ((FOLLOWING, SUM, ROWS), False),
        ((MEAN, FOLLOWING), True),
        ((MEAN, SUM), True),
        ((MEAN, ROWS, ONCE), True),
    ],
)
def test_needs_counting_where_known_and_unknown_meet(laws: tuple[TermLaw, ...], needs: bool) -> None:
    """One ratio sets right what is all unknown, and what is all known needs none."""
    assert shares.needs_counting(_pattern(*laws)) is needs


@pytest.mark.parametrize(("laws", "known"), [((FOLLOWING, SUM, ONCE), True), ((FOLLOWING, MEAN), False)])
def test_is_known_without_any_unknown(laws: tuple[TermLaw, ...], known: bool) -> None:
    """One term whose count the rows don't tell is enough."""
    assert shares.is_known(_pattern(*laws)) is known


def test_commons_are_one_factor_for_each_loss() -> None:
    """A loss whose terms have one factor has it in common, another has none; what goes in once has no say."""
    pattern = _pattern(MEAN, ONCE, MEAN, MEAN, ONCE, roots=(0, 0, 1, 1, 2))
    piece = _piece(pattern, 4, *(1.0,) * 5)
    assert shares.commons(piece, (0.4, 0.5, 0.4, 0.3, 0.5), 2) == [0.4, None, 0.5]


def test_unread_piece_has_a_weight_of_one_per_term() -> None:
    """Where no graph is read, the rows or the caller's weight decide."""
    pattern = _pattern(ROWS)
    pieces = [shares.unread(pattern, rows, [None]) for rows in (4, 3, 3)]
    whole = shares.totals(pieces)
    assert math.fsum(shares.factors(piece, whole)[0] for piece in pieces) == pytest.approx(1.0)
    assert shares.factors(pieces[0], whole) == (0.4,)
