"""One call of a decorated function: its mini-batch, what is known about such calls, and its attempts.

A call runs in attempts. One that meets something that it had to know before (another graph, the need to
count first) is rolled back, what is missing is learnt, and it is made again. One that runs out of memory is
rolled back and made again with smaller pieces, where their size is ours to choose.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from anybatch._fitting import Fitting, Fixed
from anybatch._learn import Learner
from anybatch._run import Bound, Returned
from anybatch._settings import Settings
from anybatch._warn import side_effects, warn_once
from anybatch.batch import Layout, Piece, balanced, feed
from anybatch.errors import InexactError
from anybatch.exact import graph
from anybatch.exact.clamps import Clamps, Watching, resolved
from anybatch.exact.compiled import is_compiled
from anybatch.exact.guess import guess
from anybatch.exact.pattern import Known, Pattern
from anybatch.exact.reading import Reading
from anybatch.exact.shares import PieceWeights
from anybatch.exact.terms import Key, Term
from anybatch.exact.total import PieceLosses, total
from anybatch.exact.weights import BatchWeights, Given
from anybatch.fit.reach import Reach
from anybatch.fit.transaction import Transaction
from anybatch.memory.device import release, unprepared, widest_float

_MOST_ATTEMPTS = 12
_NO_ROOM = (
    "a probe of two rows ran out of memory, so how the loss adds up was taken from its graph alone and not "
    "compared with the whole"
)


class Again(Exception):
    """The attempt can't go on with what is known.

    Attributes:
        index: The piece from which there is something to learn; None where the memory was told already.
        straddles: Is it to be learnt across the border to the piece before?
    """

    def __init__(self, index: int | None = None, *, straddles: bool = False) -> None:
        super().__init__()
        self.index = index
        self.straddles = straddles


@dataclass(eq=False)
class Call:
    """One call, its mini-batch laid out.

    Attributes:
        bound: The function and its arguments.
        layout: The mini-batch.
        settings: The options of `apply`.
        kind: What calls have in common for which one memory holds.
        memory: What is known about calls of this kind.
        reach: The modules and leaves that the function can name.
        device: Where the pieces go; None leaves each tensor where it is.
        warned: What the function has been warned about.
        sizes: The rows of each piece.
        notes: What the attempt under way is to warn about.
        tried: The pieces from which this call has learnt.
        expected: For each pattern what terms of the whole mini-batch are expected to divide by.
    """

    bound: Bound
    layout: Layout
    settings: Settings
    kind: Hashable
    memory: Known
    reach: Reach
    device: torch.device | None
    warned: set[str]
    sizes: tuple[int, ...] = field(init=False)
    notes: list[str] = field(default_factory=list, init=False)
    tried: set[tuple[int, bool]] = field(default_factory=set, init=False)
    expected: dict[Pattern, dict[Key, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._clamps = Clamps()
        self.sizes = (self.layout.rows,)
        self._weights = BatchWeights(self.settings.weights, self.layout.cut)
        self._learner = Learner(
            self.bound, self.layout, self.settings, self._weights, self.memory, self.transaction, self.device
        )
        self._fitting = self._new_fitting()

    def _new_fitting(self) -> Fitting:
        """How the options say that pieces get their size."""
        settings = self.settings
        if isinstance(settings.ub_size, int):
            return Fixed(self.bound.name, settings.ub_size, settings.shares)
        from anybatch._automatic import Automatic, Task  # loads when used (Rule 6)

        task = Task(
            self.kind,
            self.bound,
            self.layout,
            settings,
            self.reach,
            self.device,
            self.transaction,
            trains=torch.is_grad_enabled(),
        )
        return Automatic(settings.ub_size, task)

    def fit(self) -> None:
        """Cuts the mini-batch as its pieces fit into the memory that there is now."""
        self._cut(self._fitting.most_rows())

    def _cut(self, most_rows: int) -> None:
        """Cuts the mini-batch anew; what was found out about pieces of other rows is forgotten."""
        self.sizes = balanced(self.layout.rows, most_rows, self.layout.amounts)
        self.tried.clear()
        self.expected.clear()

    @property
    def is_cut(self) -> bool:
        """Is there more than one piece?"""
        return len(self.sizes) > 1

    def fitted(self, run: Callable[[], Any]) -> Any:
        """Runs, again and again with smaller pieces as long as memory runs out and they can be made smaller.

        Raises:
            DoesNotFitError: They can't.
        """
        self.fit()
        while True:
            try:
                return run()
            except Exception as error:  # any error, to ask the one guard about it
                smaller_rows = self._fitting.after(error, self.sizes)
                if smaller_rows is None:
                    raise
            # Outside the except block, whose traceback would keep the attempt's tensors alive.
            release(self.device)
            self._cut(smaller_rows)

    def in_attempts(self, attempt: Callable[[], Any]) -> Any:
        """Makes attempts, learning between them, until one goes through.

        Raises:
            InexactError: None does.
        """
        seen: set[tuple[int, bool, frozenset[tuple[Term, ...]]]] = set()
        for _ in range(_MOST_ATTEMPTS):
            self.notes.clear()
            try:
                with self._fitting.watched(self.sizes):
                    return attempt()
            except Again as again:
                index, straddles = again.index, again.straddles
            # Outside the except block, whose traceback would keep the attempt's tensors alive.
            if index is None:
                continue
            known = frozenset(pattern.terms for pattern in self.memory.patterns)
            if (index, straddles, known) in seen:
                break
            seen.add((index, straddles, known))
            self.learn(index, straddles)
        cause = "the loss has a form on some rows that neither these nor rows beside them explain"
        raise InexactError(
            "`apply`: the pieces of a mini-batch have losses of forms that can be learnt. "
            f'Got from {self.bound.name}: {cause}. Give `weight=`, for example "rows".',
            (cause,),
        )

    def should_learn(self) -> bool:
        """Is nothing known, or nothing for sure, and is it worth another probe?"""
        return not self.memory.patterns or not (self.memory.is_proved or self._learner.is_tired())

    def check_weights(self) -> None:
        """Evaluates the caller's weights, before anything runs.

        Raises:
            WeightError: One is no weight, or they don't add up over rows.
        """
        if self.is_cut:
            self._weights.check_adds_up(self.sizes)

    def learn(self, index: int, straddles: bool = False) -> None:
        """Probes the function on the piece of the given index."""
        self.tried.add((index, straddles))
        # With a size of our choice, memory may be so short that what kernels of other sizes keep matters.
        is_spared = not isinstance(self.settings.ub_size, int)
        with unprepared(self.device) if is_spared else nullcontext():
            self._learner.learn(self.sizes, index, straddles)

    def learn_again(self, index: int) -> NoReturn:
        """Starts again with what the piece of the given index shows."""
        raise Again(index)

    def refuse(self, cause: str, losses: int) -> NoReturn:
        """Says that the losses don't add up, and goes on by rows where the caller accepts that.

        Raises:
            InexactError: The caller does not.
            Again: He does.
        """
        self._learner.refuse([cause], losses)
        raise Again

    def feed(self, *, copies: bool = False) -> Iterator[Piece]:
        """The pieces one by one; copies, not views, where they are compiled or `copies` says so."""
        copies = copies or self.reach.is_compiled
        return feed(self.layout, self.sizes, self.device, copies=copies)

    def run(self, arguments: dict[str, Any]) -> Any:
        """Calls the function on a piece; sees counts before they are clamped, where that is needed."""
        self._clamps = Clamps()
        is_watched = self.is_cut and self.memory.needs_counts and not self.reach.is_compiled
        with Watching(self._clamps) if is_watched else nullcontext():
            return self.bound.run(arguments)

    def see_counts(self, weights: PieceWeights) -> None:
        """Starts again, seeing counts before they are clamped, where one may be a clamp and was not seen.

        Raises:
            Again: There is one.
        """
        if weights.is_doubtful and not (self.memory.needs_counts or self.settings.on_inexact == "ignore"):
            self.memory.needs_counts = True
            raise Again

    def transaction(self) -> Transaction:
        """A new transaction, not opened yet."""
        norms = self.settings.norms(is_cut=self.is_cut, is_compiled=is_compiled(self.bound.function))
        devices = self.settings.used_devices(self.device)
        return Transaction(self.reach, devices, self.bound.name, norms, self.settings.scaler)

    def given(self, names: Sequence[str | None], start: int, stop: int) -> list[Given | None]:
        """What the caller says of rows `start` to `stop`, for each loss."""
        return self._weights.given(names, start, stop)

    def given_for(self, piece: Piece, result: Returned) -> list[Given | None]:
        """What the caller says of a piece, for each loss that it returned."""
        return self.given(result.names, piece.start, piece.start + piece.rows)

    def match(self, piece: Piece, result: Returned) -> tuple[Pattern, list[Reading]]:
        """The pattern of the piece's losses, with its readings.

        Raises:
            Again: None is known.
        """
        matched = self.memory.match(result.losses)
        if matched is None and self.memory.has_no_room:
            self.notes.append(_NO_ROOM)
        if matched is None and (self.memory.has_no_room or self.settings.on_inexact == "ignore"):
            given = self.given_for(piece, result)
            self.memory.add(guess(graph.read(result.losses), piece.rows, given))
            matched = self.memory.match(result.losses)
        if matched is None:
            raise Again(piece.index)
        pattern, readings = matched
        return pattern, list(resolved(readings, self._clamps))

    def check_graph(self, seen: graph.Outline) -> None:
        """Goes back to the probe where the graph of the first piece is a new one.

        Raises:
            Again: It is.
        """
        if self._learner.is_new(seen):
            raise Again(0)

    def record_values(self) -> NoReturn:
        """Starts again, recording the values of terms."""
        self.memory.needs_values = True
        raise Again

    def leave_uncompiled(self) -> NoReturn:
        """Starts again, recording the values of terms in runs that torch does not compile."""
        self.memory.closes_graph = True
        self.record_values()

    def count_first(self) -> NoReturn:
        """Starts again, counting what all pieces divide by before the first backward."""
        self.memory.needs_counting = True
        raise Again

    def total(self, pieces: Sequence[PieceLosses], ratio: float) -> list[torch.Tensor]:
        """The losses of the whole mini-batch."""
        wide = widest_float(pieces[0].losses[0].device)
        return total(pieces, self.layout.rows, ratio, wide)

    def warn(self, transaction: Transaction) -> None:
        """Says, once per function, what may make the result differ; before anything is committed."""
        if not self.is_cut or self.settings.on_inexact == "ignore":
            return
        learnt = (note for pattern in self.memory.patterns for note in pattern.warnings)
        seen = side_effects(transaction, self.reach.modules)
        warn_once(self.bound.name, (*self.notes, *learnt, *seen), self.warned)
