"""What each piece's terms are multiplied with, once it is known what all pieces together divide by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anybatch.exact.law import Law, TermLaw, is_clamped
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import Reading
from anybatch.exact.terms import Key
from anybatch.exact.weights import Given


@dataclass(frozen=True, eq=False)
class PieceWeights:
    """What one piece brings to the denominators.

    Attributes:
        pattern: The pattern that explains the piece.
        rows: Its number of rows.
        weights: For each term of the pattern what it divides by here, 0 where nothing counts.
        denominators: The same, also where nothing counts.
        amounts: What each adds to what the whole divides by: less than its denominator where that is a clamp.
        is_doubtful: Does a term divide by the 1 of what may be a clamp?
        given: For each loss what the caller says of the piece; None where the graph is read.
    """

    pattern: Pattern
    rows: int
    weights: tuple[float, ...]
    denominators: tuple[float, ...]
    amounts: tuple[float, ...]
    is_doubtful: bool
    given: tuple[Given | None, ...]


def weigh(
    pattern: Pattern, readings: Sequence[Reading], rows: int, given: Sequence[Given | None]
) -> PieceWeights:
    """What the readings of a piece bring."""
    is_doubtful = any(
        _is_doubtful(reading, pattern.law(term), rows)
        for term, reading in zip(pattern.terms, readings, strict=True)
    )
    return PieceWeights(
        pattern,
        rows,
        tuple(reading.weight for reading in readings),
        tuple(reading.denominator for reading in readings),
        tuple(reading.amount for reading in readings),
        is_doubtful,
        tuple(given),
    )


def _is_doubtful(reading: Reading, known: TermLaw, rows: int) -> bool:
    """May what a term divides by be the 1 of a clamp, or a count of rows that is 1?"""
    if known.law is not Law.MEAN:
        return False
    if reading.is_masked:
        is_open = known.counts_all is None and reading.counted is None and reading.denominator == 1
        return is_open and math.isclose(known.per_row * rows, 1, rel_tol=1e-3)
    return reading.is_doubtful and known.per_row * rows != 1


def unread(pattern: Pattern, rows: int, given: Sequence[Given | None]) -> PieceWeights:
    """Of a piece whose losses are not read from their graphs."""
    ones = (1.0,) * len(pattern.terms)
    return PieceWeights(pattern, rows, ones, ones, ones, False, tuple(given))


def totals(pieces: Sequence[PieceWeights]) -> dict[Key, float]:
    """What each term of the whole mini-batch divides by: D = sum P_i - (K - 1) c0.

    A piece in which nothing counts, and that divides by the 1 of a clamp, is none of the K. An `ONCE` term
    divides by the number of pieces that have it.
    """
    amounts: dict[Key, list[float]] = {}
    offsets: dict[Key, float] = {}
    for piece in pieces:
        for place, term in enumerate(piece.pattern.terms):
            known = piece.pattern.law(term)
            offsets[term.key] = known.c0
            amounts.setdefault(term.key, [])
            if not (known.law is Law.MEAN and _is_clamped(piece, place, known)):
                amounts[term.key].append(_amount(known.law, piece, place))
    whole = {key: sum(values) - max(len(values) - 1, 0) * offsets[key] for key, values in amounts.items()}
    for key, clamp in _clamps(pieces).items():
        whole[key] = max(whole[key], clamp)
    counts = {
        term.key
        for piece in pieces
        for term, weight in zip(piece.pattern.terms, piece.weights, strict=True)
        if weight or piece.pattern.law(term).law is Law.ONCE
    }
    return {key: value if key in counts else 0.0 for key, value in whole.items()}


def _clamps(pieces: Sequence[PieceWeights]) -> dict[Key, float]:
    """What the terms divide by where their counts are below that, as far as that was met."""
    return {
        term.key: piece.denominators[place]
        for piece in pieces
        for place, term in enumerate(piece.pattern.terms)
        if piece.amounts[place] < piece.denominators[place] and piece.pattern.law(term).law is Law.MEAN
    }


def _is_clamped(piece: PieceWeights, place: int, known: TermLaw) -> bool:
    """Does a piece in which nothing counts divide by a clamp, and not by a count of its rows?"""
    if piece.weights[place] or known.counts_all:
        return False
    denominator, usual = piece.denominators[place], known.per_row * piece.rows
    is_unknown = known.counts_all is None and known.follows_rows
    if is_unknown and denominator != 1 and math.isclose(denominator, usual, rel_tol=1e-12):
        return False
    return is_clamped(denominator, usual)


def expected_totals(
    pattern: Pattern, rows: int, pieces: int, given: Sequence[Given | None]
) -> dict[Key, float]:
    """The totals as far as they are known before any piece has run, at the probe's denominators per row.

    Args:
        pattern: The pattern of the pieces.
        rows: The rows of the mini-batch.
        pieces: The number of its pieces.
        given: For each loss what the caller says of the mini-batch; None where the graph is read.
    """
    amounts = {Law.ONCE: float(pieces), Law.ROWS: float(rows), Law.SUM: 1.0}
    expected: dict[Key, float] = {}
    for term in pattern.terms:
        known = pattern.law(term)
        if known.law is Law.MEAN:
            expected[term.key] = known.per_row * rows
        else:
            expected[term.key] = amounts.get(known.law, _given_weight(given[term.root]))
    return expected


def in_exact_factors(pattern: Pattern, whole: dict[Key, float]) -> dict[Key, float]:
    """The totals, all scaled so that the first is a power of two.

    A count divided by a power of two has no rounding error in the dtype of the loss, however few digits that
    has; the common scale is made good at commit, in the dtype of the gradients.
    """
    laws = [(term.key, pattern.law(term).law) for term in pattern.terms]
    shared = [whole[key] for key, law in laws if law not in (Law.SUM, Law.ONCE) and whole[key]]
    if not shared or any(law is Law.SUM for _, law in laws):
        return whole
    scale = 2.0 ** math.ceil(math.log2(abs(shared[0]))) / abs(shared[0])
    return {key: total * scale for key, total in whole.items()}


def needs_counting(pattern: Pattern) -> bool:
    """Must all denominators be counted before the first backward?

    Not where all are known, and not where none is: then one common ratio sets them right at the end. But what
    is not linear on the way back has to meet the gradient that it would meet in the whole.
    """
    if not pattern.is_linear:
        return True
    shared = [term for term in pattern.terms if pattern.law(term).law is not Law.ONCE]
    return 0 < _unknown(pattern) < len(shared)


def is_known(pattern: Pattern) -> bool:
    """Are all denominators known before anything has run?"""
    return not _unknown(pattern)


def _unknown(pattern: Pattern) -> int:
    """How many terms divide by what no piece tells of the others."""
    laws = [pattern.law(term) for term in pattern.terms]
    return sum(law.law is Law.MEAN and not law.follows_rows for law in laws)


def factors(piece: PieceWeights, whole: Mapping[Key, float]) -> tuple[float, ...]:
    """One factor per term of the piece; 1, for torch's own result, where all together divide by zero."""
    found: list[float] = []
    for place, term in enumerate(piece.pattern.terms):
        factor = _factor(piece.pattern.law(term).law, piece, place, whole[term.key])
        # Equal but for rounding is equal: terms with one factor need no hooks.
        found.append(next((other for other in found if math.isclose(other, factor, rel_tol=1e-14)), factor))
    return tuple(found)


def _factor(law: Law, piece: PieceWeights, place: int, total: float) -> float:
    if law is Law.SUM or not total:
        return 1.0
    return (piece.weights[place] if law is Law.MEAN else _amount(law, piece, place)) / total


def _amount(law: Law, piece: PieceWeights, place: int) -> float:
    """What a piece brings to the total of one of its terms."""
    if law is Law.MEAN:
        return piece.amounts[place]
    if law is Law.GIVEN:
        return _given_weight(piece.given[piece.pattern.terms[place].root])
    return 1.0 if law is Law.ONCE else float(piece.rows)


def _given_weight(given: Given | None) -> float:
    return given.weight if given else 0.0


def common_factor(items: Sequence[tuple[Law, float]], pieces: int) -> float | None:
    """The one factor of all terms of a loss in a piece; None where they differ."""
    factors = {factor for law, factor in items if law is not Law.ONCE}
    if not factors:
        return 1 / pieces
    return factors.pop() if len(factors) == 1 else None


def commons(piece: PieceWeights, scaled: Sequence[float], pieces: int) -> list[float | None]:
    """For each loss of a piece the one factor of all its terms; None where they differ."""
    laws = [(term.root, piece.pattern.law(term).law) for term in piece.pattern.terms]
    by_root: list[list[tuple[Law, float]]] = [[] for _ in range(piece.pattern.losses)]
    for (root, law), factor in zip(laws, scaled, strict=True):
        by_root[root].append((law, factor))
    return [common_factor(items, pieces) for items in by_root]
