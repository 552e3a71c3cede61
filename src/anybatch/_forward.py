"""The forward run of one piece that trains: what it returned, and what its terms are worth."""

from anybatch._call import Call
from anybatch._run import Returned, returned
from anybatch.batch import Piece
from anybatch.exact import values
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import Reading
from anybatch.exact.values import Parts, Recorder
from anybatch.fit.transaction import Transaction


def forward(call: Call, transaction: Transaction, piece: Piece) -> Returned:
    """Calls the function on a piece, with a graph, and takes what it returned apart.

    Raises:
        LossError: It returned no loss, or ran backward itself.
    """
    value = call.run(piece.arguments)
    transaction.gradients.check_untouched(call.bound.name)
    return returned(value, call.bound.name, needs_graph=True)


def worth(
    recorder: Recorder | None, result: Returned, pattern: Pattern, readings: list[Reading]
) -> Parts | None:
    """What each term of a piece is worth, where that was recorded."""
    if recorder is None:
        return None
    return values.parts(result.losses, recorder.values, pattern.terms, readings)
