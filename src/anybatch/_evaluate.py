"""A call with gradients disabled: the same pieces and outputs, no backward.

How pieces weigh is written in the graph of the loss. So each piece runs with gradients enabled, and keeps
of its graph only what is small.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch._call import Again, Call
from anybatch._run import Returned, answer, eager, light_graph, returned
from anybatch.batch import Piece, detach, outside_inference
from anybatch.exact import graph, shares, values
from anybatch.exact.law import Law
from anybatch.exact.pattern import Pattern, weighted
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key
from anybatch.exact.total import PieceLosses
from anybatch.exact.values import Recorder
from anybatch.exact.weights import Given
from anybatch.fit.guard import is_out_of_memory
from anybatch.fit.transaction import Transaction

_NO_GRAPH = (
    "with gradients disabled the loss has no graph that could be read, and is taken for a mean over rows. "
    "Give `weight=` if it is something else"
)


@dataclass(frozen=True, eq=False)
class _Done:
    """What is kept of a piece."""

    losses: tuple[Tensor, ...]
    weights: PieceWeights
    parts: tuple[float | None, ...] | None
    result: Returned


def evaluate(call: Call) -> Any:
    """Runs the call without backward.

    Returns:
        What `train` returns.
    """
    return call.fitted(lambda: _evaluate(call))


def _evaluate(call: Call) -> Any:
    call.check_weights()
    return call.in_attempts(lambda: _attempt(call))


def _attempt(call: Call) -> Any:
    transaction = call.transaction()
    with transaction.open():
        done: list[_Done] = []
        for piece in call.feed():
            done.append(_piece(call, transaction, piece))
            del piece  # or it would live on while the next one is built (Rule 4)
        whole = shares.totals([one.weights for one in done])
        pieces = [_losses(call, one, whole) for one in done]
        losses = call.total(pieces, 1.0)
        call.warn(transaction)
        transaction.gradients.roll_back()
        transaction.norms.commit()
        return answer([one.result for one in done], losses, call.sizes, call.layout.device)


def _piece(call: Call, transaction: Transaction, piece: Piece) -> _Done:
    recorder = values.recorder() if call.memory.needs_values else None
    result = _run(call, transaction, piece, recorder)
    given = call.given_for(piece, result)
    parts = None
    if call.is_cut and _is_readable(result, given):
        if not piece.index:
            call.check_graph(graph.outline(result.losses))
        pattern, readings = call.match(piece, result)
        weights = shares.weigh(pattern, readings, piece.rows, given)
        call.see_counts(weights)
        if recorder is not None:
            parts = values.parts(result.losses, recorder.values, pattern.terms, readings)
    else:
        weights = shares.unread(_without_graph(call, given), piece.rows, given)
    losses = tuple(loss.detach() for loss in result.losses)
    return _Done(losses, weights, parts, result.settled(detach(result.others, call.layout.device)))


def _run(call: Call, transaction: Transaction, piece: Piece, recorder: Recorder | None) -> Returned:
    """Runs one piece, with a graph where it is to be read."""
    arguments: dict[str, Any] = piece.arguments
    with ExitStack() as stack:
        if _reads_graph(call):
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(eager())
            if not call.memory.keeps_results:
                stack.enter_context(light_graph())
            arguments = outside_inference(arguments)
        if recorder is not None:
            stack.enter_context(recorder)
        stack.enter_context(transaction.norms.piece())
        try:
            value = call.run(arguments)
        except RuntimeError as error:
            _try_another_way(call, error)
            raise
    transaction.gradients.check_untouched(call.bound.name)
    return returned(value, call.bound.name, needs_graph=False)


def _reads_graph(call: Call) -> bool:
    return call.is_cut and call.settings.weights.reads_graph and not call.memory.runs_plainly


def _try_another_way(call: Call, error: RuntimeError) -> None:
    """Goes on where only the graph was in the way: of inner gradients, or of `output.numpy()`.

    Raises:
        Again: There is another way to run the function.
    """
    if not _reads_graph(call) or is_out_of_memory(error):
        return
    if call.memory.keeps_results:
        call.memory.runs_plainly = True
    call.memory.keeps_results = True
    raise Again


def _is_readable(result: Returned, given: Sequence[Given | None]) -> bool:
    """Is there a loss to be read, and a graph for each that is?"""
    unread = [loss for loss, one in zip(result.losses, given, strict=True) if one is None]
    return bool(unread) and all(loss.requires_grad for loss in result.losses)


def _without_graph(call: Call, given: Sequence[Given | None]) -> Pattern:
    if call.is_cut and None in given:
        call.notes.append(_NO_GRAPH)
    return weighted([one.law if one else Law.ROWS for one in given])


def _losses(call: Call, one: _Done, whole: dict[Key, float]) -> PieceLosses:
    pattern, factors = one.weights.pattern, shares.factors(one.weights, whole)
    commons = shares.commons(one.weights, factors, len(call.sizes))
    if one.parts is None and (pattern.uses_values or None in commons):
        call.record_values()
    return PieceLosses.of(one.losses, commons, one.weights, factors, one.parts)
