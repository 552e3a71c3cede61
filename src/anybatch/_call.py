"""One call of a decorated function that trains: cut, run, scale, backward, commit.

A call runs in attempts. An attempt that learns something that it had to know before (another graph, the
need to count first) is rolled back and made again.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from anybatch._learn import Learner
from anybatch._run import Bound, Returned, light_graph, returned, shaped
from anybatch._settings import Settings
from anybatch.batch import InputGradient, Layout, Piece, balanced, detach, feed, input_gradients, join
from anybatch.errors import InexactError, InexactWarning
from anybatch.exact import evidence, graph, scale, shares
from anybatch.exact.pattern import Memory, Pattern
from anybatch.exact.rehearsal import Rehearsal
from anybatch.exact.scale import Plan
from anybatch.exact.shares import Key, PieceWeights
from anybatch.exact.terms import Reading
from anybatch.exact.total import PieceLosses, total
from anybatch.exact.values import Recorder
from anybatch.fit.modules import batch_norms
from anybatch.fit.transaction import Transaction

_MOST_ATTEMPTS = 12
_MOST_STRUCTURES = 8


class _Again(Exception):
    """The attempt can't go on with what is known.

    Attributes:
        index: The piece from which there is something to learn; None where the memory was told already.
    """

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index = index


@dataclass(frozen=True, eq=False)
class _Done:
    """What is kept of a piece: numbers, and outputs where the batch lives."""

    losses: PieceLosses
    weights: PieceWeights | None
    returned_names: tuple[str | None, ...]
    others: tuple[Any, ...]
    has_others: bool
    inputs: tuple[InputGradient, ...]


@dataclass(eq=False)
class Call:
    """One call, its mini-batch laid out.

    Attributes:
        bound: The function and its arguments.
        layout: The mini-batch.
        settings: The options of `apply`.
        memory: What is known about calls of this kind.
        modules: In reach of the function.
        device: Where the pieces go; None leaves each tensor where it is.
        warned: What the function has been warned about.
    """

    bound: Bound
    layout: Layout
    settings: Settings
    memory: Memory
    modules: Sequence[Module]
    device: torch.device | None
    warned: set[str]
    sizes: tuple[int, ...] = field(init=False)
    learner: Learner = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = balanced(self.layout.rows, self.settings.ub_size)
        self.learner = Learner(self.bound, self.layout, self.settings, self.memory, self.modules, self.device)

    def train(self) -> Any:
        """Runs the call.

        Returns:
            The loss, or a tuple of the loss and the outputs, as the function returns them.
        """
        if len(self.sizes) > 1:
            self.settings.weights.check_adds_up(self.sizes, self.layout.cut)
            if not self.memory.patterns:
                self.learner.learn(self.sizes, 0)
        for _ in range(_MOST_ATTEMPTS):
            try:
                return self._attempt()
            except _Again as again:
                index = again.index
            # Outside the except block, whose traceback would keep the attempt's tensors alive.
            if index is not None:
                self.learner.learn(self.sizes, index)
        raise InexactError(
            f"`apply`: the pieces of a mini-batch have losses of the same form. Got a new form in each of "
            f'{_MOST_ATTEMPTS} attempts from {self.bound.name}. Give `weight=`, for example "rows".'
        )

    def _attempt(self) -> Any:
        transaction = Transaction(self.modules, self._devices(), self.bound.name)
        with transaction.open():
            counted = self._count(transaction) if self._counts_first() else None
            expected = shares.totals(counted) if counted is not None else None
            done: list[_Done] = []
            for piece in feed(self.layout, self.sizes, self.device):
                done.append(self._piece(transaction, piece, expected))
                del piece
            return self._finish(transaction, done, expected)

    def _counts_first(self) -> bool:
        return self.memory.needs_counting or any(map(shares.needs_counting, self.memory.patterns))

    def _devices(self) -> list[torch.device]:
        return [] if self.device is None else [self.device]

    def _count(self, transaction: Transaction) -> list[PieceWeights]:
        """Runs all pieces forward, keeping no large results, for what their terms divide by."""
        counted: list[PieceWeights] = []
        for piece in feed(self.layout, self.sizes, self.device):
            with light_graph(), torch.compiler.set_stance("force_eager"):
                result = self._run(transaction, piece)
            pattern, readings = self._match(piece, result)
            counted.append(self._weigh(piece, result, pattern, readings))
            del piece, result, readings
        transaction.snapshot.restore()
        return counted

    def _run(self, transaction: Transaction, piece: Piece) -> Returned:
        value = self.bound.run(piece.arguments)
        transaction.gradients.check_untouched(self.bound.name)
        return returned(value, self.bound.name, needs_graph=True)

    def _match(self, piece: Piece, result: Returned) -> tuple[Pattern, list[Reading]]:
        matched = self.memory.match(result.losses)
        if matched is None:
            raise _Again(piece.index)
        return matched

    def _weigh(
        self, piece: Piece, result: Returned, pattern: Pattern, readings: Sequence[Reading]
    ) -> PieceWeights:
        given = self.settings.weights.given(
            result.names, piece.start, piece.start + piece.rows, self.layout.cut
        )
        return shares.weigh(pattern, readings, piece.rows, given)

    def _piece(self, transaction: Transaction, piece: Piece, expected: dict[Key, float] | None) -> _Done:
        recorder = Recorder() if self.memory.needs_values else None
        if recorder is not None:
            with recorder:
                result = self._run(transaction, piece)
        else:
            result = self._run(transaction, piece)
        self._look_at_graph(transaction, piece, result)
        if len(self.sizes) == 1:
            plans, weights = [Plan(1.0, (), 1.0) for _ in result.losses], None
            losses = PieceLosses.of_one_factor(result.losses, plans)
        else:
            plans, weights, losses = self._scale(piece, result, expected, recorder)
        transaction.gradients.make_fresh()
        scale.install(plans)
        torch.autograd.backward(result.losses, scale.seeds(result.losses, plans))
        transaction.gradients.look()
        return _Done(
            losses,
            weights,
            result.names,
            detach(result.others, self.layout.device),
            result.has_others,
            tuple(leaf.gradient() for leaf in piece.inputs),
        )

    def _look_at_graph(self, transaction: Transaction, piece: Piece, result: Returned) -> None:
        """Reads the whole graph of the first piece: leaves outside of modules, and whether it is known."""
        if piece.index:
            return
        seen = graph.read(result.losses)
        own = {id(leaf.leaf) for leaf in piece.inputs}
        transaction.gradients.watch(("a tensor", leaf) for leaf in seen.leaves() if id(leaf) not in own)
        if len(self.sizes) > 1 and self.learner.is_new(seen):
            raise _Again(0)

    def _scale(
        self,
        piece: Piece,
        result: Returned,
        expected: dict[Key, float] | None,
        recorder: Recorder | None,
    ) -> tuple[list[Plan], PieceWeights, PieceLosses]:
        pattern, readings = self._match(piece, result)
        weights = self._weigh(piece, result, pattern, readings)
        if expected is None:
            expected = self._expected(result, pattern)
        if any(term.key not in expected for term in pattern.terms):
            self._count_next_time()
        factors = shares.factors(weights, expected)
        plans = evidence.plans(pattern, readings, factors, len(self.sizes))
        if recorder is None and (pattern.uses_values or any(plan.common is None for plan in plans)):
            self.memory.needs_values = True
            raise _Again
        parts = None
        if recorder is not None:
            run = Rehearsal(result.losses, recorder.values, frozenset(), None)
            parts = evidence.parts(run, pattern.terms, readings)
        return plans, weights, PieceLosses.of(result.losses, plans, weights, factors, parts)

    def _expected(self, result: Returned, pattern: Pattern) -> dict[Key, float]:
        given = self.settings.weights.given(result.names, 0, self.layout.rows, self.layout.cut)
        return shares.expected_totals(pattern, self.layout.rows, given)

    def _count_next_time(self) -> None:
        self.memory.needs_counting = True
        raise _Again

    def _finish(
        self, transaction: Transaction, done: Sequence[_Done], counted: dict[Key, float] | None
    ) -> Any:
        weights = [one.weights for one in done if one.weights is not None]
        ratio = self._correction(weights, counted, done[0])
        self._give_input_gradients(transaction, done)
        self._warn(transaction)
        device = self.layout.device
        losses = total([one.losses for one in done], self.layout.rows, ratio)
        others = [
            join([one.others[place] for one in done], self.sizes, device)
            for place in range(len(done[0].others))
        ]
        transaction.gradients.commit(ratio)
        loss = shaped(done[0].returned_names, losses)
        return (loss, *others) if done[0].has_others else loss

    def _correction(
        self, weights: Sequence[PieceWeights], counted: dict[Key, float] | None, first: _Done
    ) -> float:
        """What is left to multiply gradients with, now that all denominators are known."""
        if not weights or counted is not None:
            return 1.0
        odd = shares.has_other_sum(weights)
        if odd is not None:
            self.memory.patterns.clear()
            raise _Again(odd)
        given = self.settings.weights.given(first.returned_names, 0, self.layout.rows, self.layout.cut)
        expected = {
            key: value
            for one in weights
            for key, value in shares.expected_totals(one.pattern, self.layout.rows, given).items()
        }
        ratio = shares.correction(weights, expected, shares.totals(weights))
        if ratio is None:
            self._count_next_time()
        assert ratio is not None
        return ratio

    def _give_input_gradients(self, transaction: Transaction, done: Sequence[_Done]) -> None:
        """Sends the gradients of entries that require grad up the graph that they came from, once."""
        found = input_gradients(gradient for one in done for gradient in one.inputs)
        if not found:
            return
        sources, gradients = zip(*found, strict=True)
        leaves = graph.read(sources).leaves()
        transaction.gradients.watch(("a batch entry", leaf) for leaf in leaves)
        transaction.gradients.make_fresh()
        torch.autograd.backward(sources, gradients)

    def _warn(self, transaction: Transaction) -> None:
        """Says, once per function, what may make the result differ; before anything is committed."""
        if len(self.sizes) == 1 or self.settings.on_inexact == "ignore":
            return
        notes = [note for pattern in self.memory.patterns for note in pattern.warnings]
        norms = batch_norms(transaction.snapshot.modules)
        if norms:
            names = _layer_names(self.modules, norms)
            notes.append(
                f"BatchNorm in training mode takes its statistics over each micro-batch, not over the mini-batch "
                f"({len(norms)} layers: {names}). Use GroupNorm, or put these layers in eval mode"
            )
        for note in dict.fromkeys(notes):
            if note not in self.warned:
                warnings.warn(f"`apply`: {self.bound.name}: {note}.", InexactWarning, stacklevel=5)
                self.warned.add(note)


def _layer_names(roots: Sequence[Module], layers: Sequence[Module]) -> str:
    """The layers' names in their models, the first few of them."""
    known = {module: name for root in roots for name, module in root.named_modules()}
    names = [known.get(layer) or type(layer).__name__ for layer in layers]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
