"""What is left to make good after all pieces: one ratio for all gradients, or the news that none will do."""

import math
from collections.abc import Mapping, Sequence

from anybatch.exact.law import Law
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key


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
    """The first piece in which a term divides by another number, or number per row, than it did before."""
    for index, piece in enumerate(pieces):
        for term, weight in zip(piece.pattern.terms, piece.weights, strict=True):
            known = piece.pattern.law(term)
            usual = known.per_row * piece.rows if known.law is Law.MEAN else known.constant
            is_known = (
                known.follows_rows if known.law is Law.MEAN else known.law is Law.SUM and term.end and weight
            )
            if is_known and not math.isclose(weight, usual, rel_tol=1e-6):
                return index
    return None


def has_other_sum(pieces: Sequence[PieceWeights]) -> int | None:
    """The first piece in which a term taken for a sum divides by something else than in the others."""
    constants: dict[Key, float] = {}
    for index, piece in enumerate(pieces):
        for term, weight in zip(piece.pattern.terms, piece.weights, strict=True):
            is_sum = piece.pattern.law(term).law is Law.SUM and term.end and weight
            if is_sum and not math.isclose(constants.setdefault(term.key, weight), weight, rel_tol=1e-6):
                return index
    return None
