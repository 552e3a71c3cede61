"""The pass that counts: all pieces run forward, for what their terms divide by, before the first backward."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import final

from anybatch._call import Again, Call
from anybatch._forward import forward, worth
from anybatch._run import Returned, eager, light_graph
from anybatch.batch import Piece
from anybatch.exact import shares
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key
from anybatch.exact.values import Parts, Recorder
from anybatch.fit.guard import is_out_of_memory
from anybatch.fit.modules import has_backward_hooks
from anybatch.fit.transaction import Transaction


@final
@dataclass(frozen=True, eq=False)
class Counted:
    """What the pieces divide by, and all of them together, where that was counted first.

    Attributes:
        pieces: What each piece divides by.
        totals: All of them together.
        parts: What each term of each piece is worth, where that was recorded.
    """

    pieces: list[PieceWeights]
    totals: dict[Key, float]
    parts: list[Parts | None]


def counts_first(call: Call, transaction: Transaction) -> bool:
    """Must what all pieces divide by be known before the first backward?"""
    memory = call.memory
    is_needed = memory.needs_counting or records_first(call) or _shows_gradients(call, transaction)
    return call.is_cut and (is_needed or any(map(shares.needs_counting, memory.patterns)))


def records_first(call: Call) -> bool:
    """Are terms recorded while they are counted? torch does not compile what is recorded."""
    return call.memory.needs_values and call.reach.is_compiled and not call.memory.closes_graph


def count(call: Call, transaction: Transaction) -> Counted:
    """Runs all pieces forward, keeping no large results, for what their terms divide by.

    Raises:
        Again: There is something to learn before.
    """
    counted: list[PieceWeights] = []
    parts: list[Parts | None] = []
    for piece in call.feed(copies=True):
        weights, values = _weigh(call, transaction, piece)
        counted.append(weights)
        parts.append(values)
        del piece
    transaction.snapshot.restore()
    return Counted(counted, shares.totals(counted), parts)


def _weigh(call: Call, transaction: Transaction, piece: Piece) -> tuple[PieceWeights, Parts | None]:
    """Runs a piece forward, of which nothing is kept but what its terms divide by, and are worth."""
    recorder = Recorder() if records_first(call) else None
    with recorder or nullcontext():
        result = _run_lightly(call, transaction, piece)
    pattern, readings = call.match(piece, result)
    weights = shares.weigh(pattern, readings, piece.rows, call.given_for(piece, result))
    call.see_counts(weights)
    return weights, worth(recorder, result, pattern, readings)


def _run_lightly(call: Call, transaction: Transaction, piece: Piece) -> Returned:
    """Runs a piece without keeping large results, unless gradients inside of the function need them."""
    try:
        with nullcontext() if call.memory.keeps_results else light_graph(), eager():
            return forward(call, transaction, piece)
    except RuntimeError as error:
        if call.memory.keeps_results or is_out_of_memory(error):
            raise
    call.memory.keeps_results = True
    raise Again


def _shows_gradients(call: Call, transaction: Transaction) -> bool:
    """Do hooks of modules see gradients, or change them, before it is known what these are divided by?"""
    is_known = all(map(shares.is_known, call.memory.patterns))
    return not is_known and has_backward_hooks(transaction.snapshot.modules)
