"""What is left to make good after all pieces: one ratio for all gradients, or the news that none will do."""

import math
from collections.abc import Mapping, Sequence

from anybatch.exact.law import Law, TermLaw
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key, Term

_NEARLY = 1e-3


def sums_to_one(
    pieces: Sequence[PieceWeights], seeds: Sequence[Sequence[float]], ratio: float, slack: float
) -> bool:
    """Have the terms that are the same for every piece gone in once, all pieces together?

    Args:
        pieces: What each piece brought.
        seeds: For each piece what each of its losses was multiplied with.
        ratio: What everything is multiplied with afterwards.
        slack: How far from 1 is 1.
    """
    sums: dict[Key, float] = {}
    for piece, starts in zip(pieces, seeds, strict=True):
        for term in piece.pattern.terms:
            if piece.pattern.law(term).law is Law.ONCE:
                sums[term.key] = sums.get(term.key, 0.0) + starts[term.root]
    return all(abs(total * ratio - 1.0) <= slack for total in sums.values())


def common_ratio(
    pieces: Sequence[PieceWeights], expected: Mapping[Key, float], actual: Mapping[Key, float]
) -> float | None:
    """What all gradients are to be multiplied with, now that the totals are known.

    Returns:
        The ratio of the expected total to the actual one; None where terms have different ratios, or a
        total is zero.
    """
    ratios: list[float] = []
    for key, law in {
        term.key: piece.pattern.law(term).law for piece in pieces for term in piece.pattern.terms
    }.items():
        if law is Law.MEAN and not actual[key]:
            return None
        if law is not Law.ONCE:
            is_share = law is not Law.SUM and actual[key]
            ratios.append(expected[key] / actual[key] if is_share else 1.0)
    ratio = ratios[0] if ratios else 1.0
    if any(not math.isclose(other, ratio, rel_tol=1e-12) for other in ratios):
        return None
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-15) else ratio


def departure(pieces: Sequence[PieceWeights]) -> int | None:
    """The first piece in which a term divides by another number, or number per row, than it did before.

    Where nothing counts in it, nor in those before it, the first in which something does: it shows, beside
    the one before it, what rows of which nothing counts bring.
    """
    for index, piece in enumerate(pieces):
        for place, term in enumerate(piece.pattern.terms):
            if _departs(piece, place, piece.pattern.law(term)):
                return index if index or piece.weights[place] else _first_that_counts(pieces, term)
    return None


def _departs(piece: PieceWeights, place: int, known: TermLaw) -> bool:
    weight, denominator = piece.weights[place], piece.denominators[place]
    if known.law is Law.SUM:
        has_end = bool(piece.pattern.terms[place].end)
        return has_end and bool(weight) and not math.isclose(weight, known.constant, rel_tol=1e-6)
    usual = known.per_row * piece.rows
    if known.law is not Law.MEAN:
        return False
    if not weight and not known.counts_all:
        # Is what it divides by a count of rows, or the clamp of a count?
        is_open = known.follows_rows or math.isclose(denominator, usual, rel_tol=_NEARLY)
        return known.counts_all is None and is_open
    return known.follows_rows and not math.isclose(denominator, usual, rel_tol=1e-6)


def _first_that_counts(pieces: Sequence[PieceWeights], term: Term) -> int:
    """The first piece in which a term has something to count; the first of all where there is none."""
    for index, piece in enumerate(pieces):
        if term in piece.pattern.terms and piece.weights[piece.pattern.terms.index(term)]:
            return index
    return 0


def has_other_sum(pieces: Sequence[PieceWeights]) -> int | None:
    """The first piece in which a term taken for a sum divides by something else than in the others."""
    constants: dict[Key, float] = {}
    for index, piece in enumerate(pieces):
        for term, weight in zip(piece.pattern.terms, piece.weights, strict=True):
            is_sum = piece.pattern.law(term).law is Law.SUM and term.end and weight
            if is_sum and not math.isclose(constants.setdefault(term.key, weight), weight, rel_tol=1e-6):
                return index
    return None
