"""A call that trains: run each piece, scale its terms, backward; correct and commit at the end."""

from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from anybatch._call import Call
from anybatch._count import Counted, count, counts_first, records_first
from anybatch._doubts import check_together
from anybatch._forward import forward, worth
from anybatch._run import Returned, answer
from anybatch.batch import InputGradient, Piece, detach, input_gradients
from anybatch.errors import LossError
from anybatch.exact import correction, graph, scale, shares, values
from anybatch.exact.scale import Plan
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key
from anybatch.exact.total import PieceLosses
from anybatch.exact.values import Recorder
from anybatch.fit.guard import irrevocable
from anybatch.fit.sums import ends_block, is_low, is_single
from anybatch.fit.transaction import Transaction

_LARGEST_STEP = 4.0
_training: ContextVar[str | None] = ContextVar("training", default=None)


@dataclass(frozen=True, eq=False)
class _Done:
    """What is kept of a piece: numbers, and outputs where the batch lives."""

    losses: PieceLosses
    seeds: tuple[float, ...]
    result: Returned
    inputs: tuple[InputGradient, ...]


def train(call: Call) -> Any:
    """Runs the call.

    Returns:
        The loss, or a tuple of the loss and the outputs, as the function returns them.

    Raises:
        LossError: Another call is training: this one would run once for each of its pieces.
    """
    outer = _training.get()
    if outer is not None:
        raise LossError(
            "`apply`: a call that trains is made by itself, for it runs backward. "
            f"Got {call.bound.name} inside of {outer}, which runs once per micro-batch. Call it before."
        )
    token = _training.set(call.bound.name)
    try:
        return call.fitted(lambda: _train(call))
    finally:
        _training.reset(token)


def _train(call: Call) -> Any:
    call.check_weights()
    if call.is_cut and call.should_learn():
        call.learn(0)
        call.fit()  # the probe has prepared kernels, which take memory
    return call.in_attempts(lambda: _attempt(call))


def _attempt(call: Call) -> Any:
    transaction = call.transaction()
    with transaction.open():
        counted = count(call, transaction) if counts_first(call, transaction) else None
        done: list[_Done] = []
        for piece in call.feed():
            done.append(_piece(call, transaction, piece, counted))
            del piece  # or it would live on while the next one is built (Rule 4)
        if call.is_cut:
            check_together(call, _weights(done))
        ratio = _ratio(call, transaction, done, counted) if call.is_cut else 1.0
        transaction.gradients.settle(ratio)
        _give_input_gradients(transaction, done, ratio)
        losses = call.total([one.losses for one in done], ratio)
        result = answer([one.result for one in done], losses, call.sizes, call.layout.device)
        call.warn(transaction)
        transaction.commit()
        _note_strays(call, transaction)
        call.memory.was_watched = True
        return result


def _note_strays(call: Call, transaction: Transaction) -> None:
    call.memory.has_strays = call.memory.has_strays or transaction.has_met_strays


def _stop_watching(call: Call, transaction: Transaction) -> None:
    """After the first piece, where all modules of such calls are in reach: torch runs them faster alone.

    A compiled function would be compiled again without the hook.
    """
    _note_strays(call, transaction)
    if call.memory.was_watched and not (call.memory.has_strays or call.reach.is_compiled):
        transaction.stop_watching()


def _weights(done: Sequence[_Done]) -> list[PieceWeights]:
    """What each piece divides by."""
    return [one.losses.weights for one in done if one.losses.weights is not None]


def _piece(call: Call, transaction: Transaction, piece: Piece, counted: Counted | None) -> _Done:
    recorder = values.recorder() if call.memory.needs_values and not records_first(call) else None
    with recorder or nullcontext(), transaction.norms.piece():
        result = forward(call, transaction, piece)
    if not piece.index:
        _stop_watching(call, transaction)
        transaction.scaler.check_unscaled(result.losses, call.bound.name)
    if not piece.index or call.memory.has_bare_leaves:
        _look_at_graph(call, transaction, piece, result)
    if call.is_cut:
        plans, losses = _scale(call, piece, result, counted, recorder)
    else:
        plans = [Plan(1.0, (), 1.0) for _ in result.losses]
        losses = PieceLosses.in_one_piece(result.losses)
    transaction.gradients.make_fresh()
    scale.install(plans)
    share, takes_all = scale.exact_share(result.losses, plans), _takes_all(call, piece, result)
    torch.autograd.backward(scale.seeded(transaction.scaler.scaled(result.losses), plans, share))
    transaction.gradients.look()
    if call.is_cut:
        transaction.gradients.gather(share, takes_all=takes_all)
    inputs = tuple(leaf.gradient(share) for leaf in piece.inputs)
    return _Done(
        losses,
        tuple(plan.seed for plan in plans),
        result.settled(detach(result.others, call.layout.device)),
        inputs,
    )


def _takes_all(call: Call, piece: Piece, result: Returned) -> bool:
    """Is all that was accumulated to be added up apart from what comes after the piece?"""
    if any(is_low(loss.dtype) for loss in result.losses):
        return True
    if not ends_block(piece.index, len(call.sizes)):
        return False
    if call.memory.is_single is None:
        call.memory.is_single = is_single(graph.lowest_precision(graph.read(result.losses).nodes))
    return call.memory.is_single


def _look_at_graph(call: Call, transaction: Transaction, piece: Piece, result: Returned) -> None:
    """Reads the whole graph: leaves outside of modules, and whether the first piece's is known.

    Where there are such leaves, every piece may bring others.
    """
    seen = graph.outline(result.losses)
    own = {id(leaf.leaf) for leaf in piece.inputs}
    leaves = [leaf for leaf in seen.leaves if id(leaf) not in own]
    if transaction.gradients.watch(("a tensor", leaf) for leaf in leaves):
        call.memory.has_bare_leaves = True
    if call.is_cut and not piece.index:
        call.check_graph(seen)


def _scale(
    call: Call, piece: Piece, result: Returned, counted: Counted | None, recorder: Recorder | None
) -> tuple[list[Plan], PieceLosses]:
    """How to run backward through the losses of a piece, and what to keep of them."""
    if graph.is_compiled(result.losses):
        return _scale_compiled(call, piece, result, counted)
    pattern, readings = call.match(piece, result)
    weights = shares.weigh(pattern, readings, piece.rows, call.given_for(piece, result))
    call.see_counts(weights)
    whole = counted.totals if counted else _expected(call, weights, result.names, result.losses)
    if any(term.key not in whole for term in pattern.terms):
        call.count_first()
    factors = shares.factors(weights, whole)
    is_final = counted is not None or shares.is_known(pattern)
    try:
        plans = scale.plans(pattern, readings, factors, len(call.sizes), is_final=is_final)
    except scale.CannotScale as reason:
        call.refuse(str(reason), pattern.losses)
    commons = [plan.common for plan in plans]
    parts = counted.parts[piece.index] if counted else None
    if recorder is not None:
        parts = worth(recorder, result, pattern, readings)
    if parts is None and (pattern.uses_values or None in commons):
        call.record_values()
    return plans, PieceLosses.of(result.losses, commons, weights, factors, parts)


def _scale_compiled(
    call: Call, piece: Piece, result: Returned, counted: Counted | None
) -> tuple[list[Plan], PieceLosses]:
    """The same for losses whose graph a compiler has closed: what they divide by was counted uncompiled.

    They can be scaled as wholes only.
    """
    if counted is None:
        call.count_first()
    weights = counted.pieces[piece.index]
    factors = shares.factors(weights, counted.totals)
    commons = shares.commons(weights, factors, len(call.sizes))
    if weights.pattern.uses_values or None in commons:
        call.leave_uncompiled()
    plans = [Plan(common, (), common) for common in commons if common is not None]
    return plans, PieceLosses.of(result.losses, commons, weights, factors, None)


def _expected(
    call: Call, weights: PieceWeights, names: Sequence[str | None], losses: Sequence[torch.Tensor]
) -> dict[Key, float]:
    """What terms of the whole mini-batch are expected to divide by, up to a common scale."""
    pattern, rows = weights.pattern, call.layout.rows
    if pattern not in call.expected:
        whole = shares.expected_totals(pattern, rows, len(call.sizes), call.given(names, 0, rows))
        has_low = any(is_low(loss.dtype) for loss in losses)
        call.expected[pattern] = shares.in_exact_factors(pattern, whole) if has_low else whole
    return call.expected[pattern]


def _ratio(call: Call, transaction: Transaction, done: Sequence[_Done], counted: Counted | None) -> float:
    """What is left to multiply gradients with, after all pieces.

    Scaled losses are to reach backward at about the size that they have in the mini-batch: too large they
    overflow, too small they vanish.
    """
    weights = _weights(done)
    ratio = 1.0 if counted is not None else _correction(call, done, weights)
    slack = max(1e-12, *(8 * torch.finfo(loss.dtype).eps for loss in done[0].losses.losses))
    if not correction.sums_to_one(weights, [one.seeds for one in done], ratio, slack):
        if counted is None:
            call.count_first()
        call.refuse(
            "what is the same for every piece can't be shared out among them; return it in a dict of losses",
            len(done[0].losses.losses),
        )
    is_far = not 1 / _LARGEST_STEP <= abs(ratio) <= _LARGEST_STEP
    if is_far and counted is None and transaction.scaler.is_on:
        call.count_first()
    return ratio


def _correction(call: Call, done: Sequence[_Done], weights: Sequence[PieceWeights]) -> float:
    """What the denominators of all pieces make of the expected ones."""
    odd = None if call.settings.on_inexact == "ignore" else correction.has_other_sum(weights)
    if odd is not None:
        call.memory.patterns.clear()
        call.learn_again(odd)
    expected: dict[Key, float] = {}
    # One piece of each pattern: what is expected does not depend on the piece.
    for one in {id(one.pattern): one for one in weights}.values():
        expected.update(_expected(call, one, done[0].result.names, done[0].losses.losses))
    ratio = correction.common_ratio(weights, expected, shares.totals(weights))
    if ratio is None:
        call.count_first()
    return ratio


def _give_input_gradients(transaction: Transaction, done: Sequence[_Done], ratio: float) -> None:
    """Sends the gradients of entries that require grad up the graph that they came from, once."""
    found = input_gradients(gradient for one in done for gradient in one.inputs)
    if found:
        sources, gradients = zip(*found, strict=True)
        transaction.gradients.watch(("a batch entry", leaf) for leaf in graph.outline(sources).leaves)
        transaction.gradients.make_fresh()
        scaled = [gradient * ratio for gradient in gradients]
        # Backward uses the caller's graph up: no other attempt could go up it again.
        with irrevocable() if any(source.grad_fn is not None for source in sources) else nullcontext():
            torch.autograd.backward(sources, scaled)
