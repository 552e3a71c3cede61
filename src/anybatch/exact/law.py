"""How a term of the pieces becomes the term of the whole mini-batch: one law, read from three runs.

Let P(A) be what a term divides by on rows A, constants on its path included. Whether such a constant is a
count or a coefficient can't be told, and need not be: all that matters is

    P(A and B) = P(A) + P(B) - c0

With c0 = 0 the term is a mean, with c0 = P a sum (possibly over a constant), with a small c0 a mean with
an epsilon. The piece's share of the whole term is then P_i / D with D = sum P_i - (K - 1) c0.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anybatch.exact.reading import Reading

_NEAR = 1e-6
_SMALL = 1e-3
_PROOFS = 3


class Law(enum.Enum):
    """What to multiply a piece's term with."""

    MEAN = "mean"
    """P_i / D."""
    SUM = "sum"
    """1."""
    ROWS = "rows"
    """Its share of the rows: an unreadable term that combines like a mean."""
    GIVEN = "given"
    """Its share of the weights that the caller gave."""
    ONCE = "once"
    """Anything that sums to 1: the term is the same for every piece."""


@dataclass(frozen=True)
class TermLaw:
    """The law of one term.

    Attributes:
        law: Its kind.
        c0: The constant of the law, for MEAN.
        per_row: The denominator per row that the probe met, for MEAN.
        follows_rows: Is it the same for any rows, so that D is known before anything runs?
        constant: What a SUM was found to divide by.
        c0_error: The rounding error that c0 may have.
        needs_proof: Is c0 too large for an epsilon, so that another cut has to find the same?
        counts_all: Do rows of which nothing counts bring to D what they divide by? Those of `sum / len(x)`
            do; a count of what counts, and its clamp, brings nothing. None before such rows were met beside
            others.
    """

    law: Law
    c0: float = 0.0
    per_row: float = 1.0
    follows_rows: bool = False
    constant: float = 1.0
    c0_error: float = 0.0
    needs_proof: bool = False
    counts_all: bool | None = None


class NoLaw(Exception):
    """The denominators of the halves don't add up to that of the whole."""


def of_denominators(
    whole: Reading, halves: Sequence[Reading], rows: Sequence[int], rounding: float
) -> TermLaw:
    """The law of a term whose denominators can be read.

    Args:
        whole: The term on a piece.
        halves: The term on each half of that piece.
        rows: The number of rows in each half.
        rounding: The relative rounding error that denominators may have.

    Raises:
        NoLaw: There is none, such as for a division by the square root of the number of rows.
    """
    if any(not _same(left, right) for half in halves for left, right in _pairs(whole, half)):
        raise NoLaw("is multiplied by values that differ from piece to piece (fractions of the batch, say)")
    raw = [half.denominator for half in halves]
    counts_all = _counts_all(whole, halves)
    if all(_near(value, whole.denominator) for value in raw):
        return TermLaw(Law.SUM, constant=whole.denominator, counts_all=counts_all)
    c0 = sum(half.amount for half in halves) - whole.amount if counts_all else _offset(whole, halves)
    if abs(c0) > _SMALL * abs(whole.weight) and any(half.is_doubtful for half in halves):
        c0 = _offset(whole, [half for half in halves if not half.is_doubtful])
    is_large = abs(c0) > _SMALL * abs(whole.weight)
    amounts = [half.denominator if counts_all else half.weight for half in halves]
    if is_large and not all(amount > c0 * (1 + _NEAR) > 0 for amount in amounts):
        values = f"{raw[0]:g} and {raw[1]:g} for the halves, {whole.denominator:g} for both together"
        raise NoLaw(f"divides by something that does not add up over rows: {values}")
    if abs(c0) <= rounding * abs(whole.weight):
        c0 = 0.0
    per_row = whole.weight / sum(rows)
    follows_rows = all(_near(value, per_row * n, 1e-12) for value, n in zip(amounts, rows, strict=True))
    error = rounding * abs(whole.weight)
    return TermLaw(
        Law.MEAN,
        c0,
        per_row or 1.0,
        follows_rows,
        c0_error=error,
        needs_proof=is_large,
        counts_all=counts_all,
    )


def _counts_all(whole: Reading, halves: Sequence[Reading]) -> bool | None:
    """Does a half of which nothing counts bring what it divides by? None where no such half is seen."""
    empty = [half for half in halves if half.is_masked]
    if whole.is_masked or len(empty) != 1 or empty[0].counted is not None:
        return None
    without = sum(half.amount for half in halves if not half.is_masked)
    return abs(without + empty[0].amount - whole.amount) < abs(without - whole.amount)


def is_clamped(masked: float, usual: float) -> bool:
    """Is what a piece divides by, in which nothing counts, the 1 of a clamp? An epsilon would be smaller."""
    return abs(masked) > _SMALL * abs(usual)


def _offset(whole: Reading, halves: Sequence[Reading]) -> float:
    """c0, from the halves that are not clamped."""
    amounts = [
        half.amount for half in halves if half.weight or not is_clamped(half.denominator, whole.denominator)
    ]
    return sum(amounts) - whole.amount if len(amounts) > 1 else 0.0


def common(laws: Sequence[TermLaw]) -> TermLaw:
    """The law that several cuts of the same loss agree on.

    A mean may look like a sum where halves have equal denominators by chance, not the other way round. Where
    it follows the rows of each cut, at different rates, it is still said to follow them: pieces that depart
    from the rate are looked at together (`correction.departure`).

    Raises:
        NoLaw: They are means with different constants, or too few have found a large one.
    """
    means = [one for one in laws if one.law is Law.MEAN]
    if not means:
        if len({one.law for one in laws}) > 1:
            raise NoLaw("combines like a sum on some rows, and like a mean on others")
        return laws[0]
    if any(abs(one.c0 - means[0].c0) > 2 * max(one.c0_error, means[0].c0_error) for one in means):
        raise NoLaw("divides by something that adds up over rows only nearly")
    if means[0].needs_proof and len(means) < _PROOFS:
        raise NoLaw(f"divides by something that does not add up over rows, but for {means[0].c0:g} too much")
    return replace(
        means[-1],
        follows_rows=all(one.follows_rows for one in laws),
        counts_all=counting([one.counts_all for one in means]),
    )


def counting(said: Sequence[bool | None]) -> bool | None:
    """What several cuts say together of rows of which nothing counts."""
    known = [one for one in said if one is not None]
    return any(known) if known else None


def of_values(whole: float, halves: Sequence[float], rows: Sequence[int], tolerance: float) -> Law | None:
    """The law that the values of an unreadable term obey: a mean over rows, a sum, or neither (None)."""
    shares = [n / sum(rows) for n in rows]
    mean = sum(share * value for share, value in zip(shares, halves, strict=True))
    if abs(mean - whole) <= tolerance:
        return Law.ROWS
    return Law.SUM if abs(sum(halves) - whole) <= tolerance else None


def of_constants(whole: Reading, halves: Sequence[Reading], rows: Sequence[int]) -> TermLaw:
    """The law of a term made of parameters, into which data may come through constants.

    Raises:
        NoLaw: The constants of the halves combine neither like a sum nor like a mean over rows.
    """
    pairs = [
        (left, rights)
        for left, *rights in zip(whole.vectors, *(half.vectors for half in halves), strict=True)
        if not all(_same(left, right) for right in rights)
    ]
    if not pairs:
        return TermLaw(Law.ONCE)
    left, rights = pairs[0]
    if len(pairs) == 1 and all(right.shape == left.shape for right in rights):
        shares = [n / sum(rows) for n in rows]
        if _same(left, _weighted_sum(rights, [1.0] * len(rights))):
            return TermLaw(Law.SUM)
        if _same(left, _weighted_sum(rights, shares)):
            return TermLaw(Law.ROWS)
    raise NoLaw("of parameters is scaled by values that do not add up over rows")


def _weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return torch.stack([value.double() * weight for value, weight in zip(values, weights, strict=True)]).sum(
        0
    )


def _pairs(whole: Reading, half: Reading) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(whole.vectors, half.vectors, strict=True))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.double(), right.double(), rtol=_NEAR, atol=0)


def _near(left: float, right: float, tolerance: float = _NEAR) -> bool:
    return abs(left - right) <= tolerance * max(abs(left), abs(right))
