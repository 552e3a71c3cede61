"""Forward runs of the user's function that leave no trace: what the probe looks at."""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch._run import Bound, eager, light_graph, returned
from anybatch.batch import Layout, outside_inference, piece_of
from anybatch.exact.clamps import Clamps
from anybatch.exact.graph import node_of
from anybatch.exact.rehearsal import NoRoom, Rehearsal
from anybatch.exact.terms import Term, unlabelled
from anybatch.exact.values import Recorder
from anybatch.fit.guard import is_out_of_memory
from anybatch.fit.modules import is_noisy, watching
from anybatch.fit.transaction import Transaction


class _Mode(enum.Enum):
    """Which modules are run in eval mode, so that runs can be compared."""

    AS_IS = "none"
    NOISY = "BatchNorm, dropout and recurrent layers"
    ALL = "all"


class Rehearser:
    """Runs rows of a mini-batch forward and puts everything back.

    Runs that draw random numbers, or that leave running statistics behind, say nothing about each other.
    Where a function does either, the modules that do it are run in eval mode; where that is not enough, all.
    """

    def __init__(
        self,
        bound: Bound,
        layout: Layout,
        device: torch.device | None,
        most_rows: int,
        transaction: Callable[[], Transaction],
    ) -> None:
        self._bound = bound
        self._layout = layout
        self._device = device
        self._most_rows = most_rows
        self._transaction = transaction
        self._mode: _Mode | None = None
        self._needs_results = False
        self._forms: list[Term] | None = None
        self.notes: list[str] = []
        self.names: tuple[str | None, ...] = ()

    def __call__(self, start: int, stop: int, *, keeps: bool, records: bool = True) -> Rehearsal:
        """Runs rows `start` to `stop`.

        Raises:
            NoRoom: Out of memory with more rows than a piece has.
        """
        try:
            if self._mode is None:
                run = self._find_mode(start, stop, records)
                if run is not None and not keeps:
                    return run
            return self._run_lightly(start, stop, keeps, self._mode or _Mode.AS_IS, records)
        except Exception as error:  # any error, to ask the one guard about it
            if stop - start <= self._most_rows or not is_out_of_memory(error):
                raise
        raise NoRoom

    def _run_lightly(
        self, start: int, stop: int, keeps: bool, mode: _Mode, records: bool = False
    ) -> Rehearsal:
        """Runs without large results, if that is wanted and no inner gradient needs them."""
        if keeps or self._needs_results:
            return self._run(start, stop, True, mode, records)
        try:
            return self._run(start, stop, False, mode, records)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
        self._needs_results = True
        return self._run(start, stop, True, mode, records)

    def _find_mode(self, start: int, stop: int, records: bool) -> Rehearsal | None:
        """Settles the mode: the one that changes least of those in which runs can be compared.

        Returns:
            The run as it is, where that is the mode.
        """
        as_is = self._as_is(start, stop, records)
        self._mode = _Mode.AS_IS
        if as_is is not None and as_is.not_comparable is None:
            return as_is
        self._forms = None if as_is is None else _forms(as_is)
        helping = (mode for mode in (_Mode.NOISY, _Mode.ALL) if self._helps(start, stop, mode))
        self._mode = next(helping, _Mode.AS_IS)
        return None

    def _as_is(self, start: int, stop: int, records: bool) -> Rehearsal | None:
        """A run as it is; None where it fails as BatchNorm does that gets a single row on one of its devices.

        A failure of another kind comes again where it matters.
        """
        try:
            return self._run_lightly(start, stop, False, _Mode.AS_IS, records)
        except ValueError:
            return None

    def _helps(self, start: int, stop: int, mode: _Mode) -> bool:
        try:
            run = self._run_lightly(start, stop, False, mode)
            return run.not_comparable is None and self._forms in (None, _forms(run))
        except Exception:  # what fails in this mode only (some models return no loss then) is no failure
            return False

    def _run(self, start: int, stop: int, keeps: bool, mode: _Mode, records: bool) -> Rehearsal:
        piece = piece_of(self._layout, start, stop - start, self._device)
        recorder = Recorder() if records else None
        with (
            self._conditions(mode) as transaction,
            nullcontext() if keeps else light_graph(),
            recorder or nullcontext(),
        ):
            value = self._bound.run(outside_inference(piece.arguments))
            transaction.gradients.check_untouched(self._bound.name)
            result = returned(value, self._bound.name, needs_graph=True)
            not_comparable = _why_not_comparable(transaction)
            if mode is _Mode.AS_IS:
                self._note_buffers(transaction)
        inputs = frozenset(id(leaf.leaf) for leaf in piece.inputs)
        self.names = result.names
        # As they are, modules have just been seen to leave nothing behind: their backward does not either.
        is_as_is = mode is _Mode.AS_IS and not transaction.norms.changes_layers
        conditions = eager if is_as_is else partial(self._conditions, mode)
        recorded, clamps = (recorder.values, recorder.clamps) if recorder else ({}, Clamps())
        return Rehearsal(result.losses, recorded, inputs, not_comparable, clamps, conditions)

    @contextmanager
    def _conditions(self, mode: _Mode) -> Iterator[Transaction]:
        """A context in which what runs leaves no trace."""
        transaction = self._transaction()
        with ExitStack() as stack:
            stack.enter_context(undone(transaction))
            stack.enter_context(_in_eval_mode(transaction, mode))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(eager())
            yield transaction

    def _note_buffers(self, transaction: Transaction) -> None:
        changed = transaction.snapshot.changed_buffers()
        others = [(module, name) for module, name in changed if not isinstance(module, _BatchNorm)]
        if others and not self.notes:
            self.notes.append(
                f"buffers change once per micro-batch ({_named(others)}), not once per mini-batch"
            )


def _forms(run: Rehearsal) -> list[Term]:
    """What the way down from each loss looks like: another one in eval mode is another loss."""
    return [unlabelled(index, node_of(loss)) for index, loss in enumerate(run.losses)]


@contextmanager
def undone(transaction: Transaction) -> Iterator[Transaction]:
    """Opens the transaction, and rolls it back also where nothing fails."""
    with transaction.open():
        yield transaction
    transaction.roll_back()


@contextmanager
def _in_eval_mode(transaction: Transaction, mode: _Mode) -> Iterator[None]:
    def evaluate(module: Module) -> None:
        transaction.enter(module)
        if mode is _Mode.ALL or (mode is _Mode.NOISY and is_noisy(module)):
            module.training = False

    for module in transaction.snapshot.modules:
        evaluate(module)
    with watching(evaluate):
        yield


def _why_not_comparable(transaction: Transaction) -> str | None:
    if transaction.norms.taking_batch_statistics(transaction.snapshot.modules):
        return "BatchNorm uses the statistics of the piece"
    if transaction.snapshot.has_drawn_random_numbers():
        return "the function draws random numbers"
    changed = transaction.snapshot.changed_buffers()
    return f"the function changes buffers ({_named(changed)})" if changed else None


def _named(changed: Sequence[tuple[Module, str]]) -> str:
    return ", ".join([f"{type(module).__name__}.{name}" for module, name in changed[:3]])
