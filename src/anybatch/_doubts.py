"""Doubts that only all pieces of an attempt together can raise: rows from which there is more to learn."""

from collections.abc import Sequence
from itertools import pairwise

from anybatch._call import Again, Call
from anybatch.exact import correction
from anybatch.exact.shares import PieceWeights

_DOUBTFUL = (
    "a micro-batch divides its loss by exactly 1, which may be a count or, where nothing counts, its clamp; "
    "it is taken for a count. Say with `weight=` what counts"
)


def check_together(call: Call, weights: Sequence[PieceWeights]) -> None:
    """Goes back to the probe where the pieces do not fit together as they would by what is known.

    Args:
        call: The call.
        weights: What each piece divides by, in row order.

    Raises:
        Again: They don't, and nothing was learnt from these rows yet.
    """
    if any(one.is_doubtful for one in weights):
        call.notes.append(_DOUBTFUL)
    if call.settings.on_inexact != "ignore":
        _check_proof(call, weights)
        _check_forms(call, weights)
        _check_departure(call, weights)


def _check_proof(call: Call, weights: Sequence[PieceWeights]) -> None:
    """The probe has only met rows in which nothing counted, and there are others."""
    if call.memory.is_proved:
        return
    for index, one in enumerate(weights):
        if (index, False) not in call.tried and all(one.weights):
            raise Again(index)


def _check_forms(call: Call, weights: Sequence[PieceWeights]) -> None:
    """Two neighbours have different terms, and no two like them were looked at together yet.

    One may have nothing to count. Or the loss is switched by its own value.
    """
    for index, (one, other) in enumerate(pairwise(weights), start=1):
        pair = frozenset((one.pattern.terms, other.pattern.terms))
        if len(pair) > 1 and pair not in call.memory.compared:
            call.memory.compared.add(pair)
            raise Again(index, straddles=True)


def _check_departure(call: Call, weights: Sequence[PieceWeights]) -> None:
    """A piece divides by more or less per row than all rows before it.

    A mask does that, and is fine. Rows cropped to the longest of their piece do it too, and are not.
    """
    index = correction.departure(weights)
    if index is not None:
        where = (index, index > 0)
        if where not in call.tried:
            raise Again(index, straddles=index > 0)
