"""The loss of the whole mini-batch, from those of its pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.exact.law import Law
from anybatch.exact.shares import PieceWeights


@dataclass(frozen=True, eq=False)
class PieceLosses:
    """What is kept of the losses of one piece.

    Attributes:
        losses: Detached.
        commons: For each loss the one factor that all its terms have; None where they differ.
        weights: What the piece brought to the denominators; None for a mini-batch in one piece.
        factors: The factor of each term.
        parts: What each term adds to its loss, where the values are needed.
    """

    losses: tuple[Tensor, ...]
    commons: tuple[float | None, ...]
    weights: PieceWeights | None = None
    factors: tuple[float, ...] = ()
    parts: tuple[float | None, ...] | None = None

    @classmethod
    def in_one_piece(cls, losses: Sequence[Tensor]) -> "PieceLosses":
        return cls(tuple(loss.detach() for loss in losses), (1.0,) * len(losses))

    @classmethod
    def of(
        cls,
        losses: Sequence[Tensor],
        commons: Sequence[float | None],
        weights: PieceWeights,
        factors: Sequence[float],
        parts: Sequence[float | None] | None,
    ) -> "PieceLosses":
        kept = None if parts is None else tuple(parts)
        detached = tuple(loss.detach() for loss in losses)
        return cls(detached, tuple(commons), weights, tuple(factors), kept)


def total(pieces: Sequence[PieceLosses], rows: int, ratio: float, wide: torch.dtype) -> list[Tensor]:
    """The losses of the whole mini-batch, detached, in the dtype and on the device of the pieces' losses.

    Args:
        pieces: In row order.
        rows: The number of rows of the mini-batch.
        ratio: What all factors are still to be multiplied with.
        wide: The dtype to add up in.
    """
    return [_total(pieces, root, rows, ratio, wide) for root in range(len(pieces[0].losses))]


def _total(pieces: Sequence[PieceLosses], root: int, rows: int, ratio: float, wide: torch.dtype) -> Tensor:
    if _adds_up_by_parts(pieces, root):
        return pieces[0].losses[root].new_tensor(_by_parts(pieces, root, rows, ratio))
    first = pieces[0].losses[root]
    counted = [(piece.losses[root], factor) for piece in pieces if (factor := piece.commons[root])]
    if not counted:
        return torch.zeros_like(first)
    losses, factors = zip(*counted, strict=True)
    values = torch.stack(losses).to(wide)
    return (values @ values.new_tensor(factors) * ratio).to(first.dtype)


def _adds_up_by_parts(pieces: Sequence[PieceLosses], root: int) -> bool:
    """Must the loss be put together term by term?"""
    if any(piece.commons[root] is None for piece in pieces):
        return True
    return any(piece.weights and piece.weights.pattern.remainders[root] for piece in pieces)


def _by_parts(pieces: Sequence[PieceLosses], root: int, rows: int, ratio: float) -> float:
    value = 0.0
    rests: list[tuple[float, int, Law]] = []
    for piece in pieces:
        assert piece.weights is not None
        assert piece.parts is not None
        rest = float(piece.losses[root].double())
        for term, factor, part in zip(piece.weights.pattern.terms, piece.factors, piece.parts, strict=True):
            if term.root == root and piece.weights.pattern.law(term).law is not Law.ONCE:
                value += factor * part * ratio if factor and part is not None else 0.0
                rest -= part or 0.0
        if abs(rest) < float("inf"):
            rests.append((rest, piece.weights.rows, piece.weights.pattern.remainders[root] or Law.ONCE))
    return value + _rest(rests, rows)


def _rest(rests: Sequence[tuple[float, int, Law]], rows: int) -> float:
    """What the loss has beside its terms: once, summed, or as a mean over rows."""
    if not rests:
        return 0.0
    if rests[0][2] is Law.ONCE:
        return rests[0][0]
    if rests[0][2] is Law.SUM:
        return sum(rest for rest, _, _ in rests)
    return sum(rest * count / rows for rest, count, _ in rests)
