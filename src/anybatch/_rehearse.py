"""Forward runs of the user's function that leave no trace: what the probe looks at."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Module

from anybatch._run import Bound, Returned, light_graph, returned
from anybatch.batch import Layout, piece_of
from anybatch.exact.rehearsal import NoRoom, Rehearsal
from anybatch.exact.values import Recorder
from anybatch.fit.guard import is_out_of_memory
from anybatch.fit.modules import batch_norms, watching
from anybatch.fit.transaction import Transaction


class Rehearser:
    """Runs rows of a mini-batch forward and puts everything back.

    Runs that draw random numbers, or that leave running statistics behind, say nothing about each other.
    Where the modules do either, they are run in eval mode.
    """

    def __init__(
        self,
        bound: Bound,
        layout: Layout,
        device: torch.device | None,
        modules: Sequence[Module],
        most_rows: int,
    ) -> None:
        self._bound = bound
        self._layout = layout
        self._device = device
        self._modules = modules
        self._most_rows = most_rows
        self._evaluates = False
        self._has_tried = False
        self.names: tuple[str | None, ...] = ()

    def __call__(self, start: int, stop: int, *, keeps: bool) -> Rehearsal:
        """Runs rows `start` to `stop`.

        Raises:
            NoRoom: Out of memory with more rows than a piece has.
        """
        try:
            return self._rehearse(start, stop, keeps)
        except Exception as error:
            if stop - start <= self._most_rows or not is_out_of_memory(error):
                raise
        raise NoRoom

    def _rehearse(self, start: int, stop: int, keeps: bool) -> Rehearsal:
        if not self._has_tried:
            self._has_tried = True
            run = self._run(start, stop, keeps)
            if run.not_comparable is None or not self._can_evaluate(start, stop):
                return run
            self._evaluates = True
        return self._run(start, stop, keeps)

    def _can_evaluate(self, start: int, stop: int) -> bool:
        """Does the function return a loss in eval mode too? Some models then return predictions."""
        self._evaluates = True
        try:
            self._run(start, stop, keeps=False)
        except Exception:  # whatever fails in eval mode only is no failure of the call
            return False
        finally:
            self._evaluates = False
        return True

    def _run(self, start: int, stop: int, keeps: bool) -> Rehearsal:
        piece = piece_of(self._layout, start, stop - start, self._device)
        transaction = Transaction(self._modules, _devices(self._device), self._bound.name)
        recorder = Recorder()
        with ExitStack() as stack:
            stack.enter_context(_undone(transaction))
            if self._evaluates:
                stack.enter_context(_in_eval_mode(transaction))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if not keeps:
                stack.enter_context(light_graph())
            stack.enter_context(recorder)
            result = self._returned(self._bound.run(piece.arguments))
            transaction.gradients.check_untouched(self._bound.name)
            not_comparable = _why_not_comparable(transaction)
        inputs = frozenset(id(leaf.leaf) for leaf in piece.inputs)
        self.names = result.names
        return Rehearsal(result.losses, recorder.values, inputs, not_comparable)

    def _returned(self, value: object) -> Returned:
        return returned(value, self._bound.name, needs_graph=True)


def _devices(device: torch.device | None) -> list[torch.device]:
    return [] if device is None else [device]


@contextmanager
def _undone(transaction: Transaction) -> Iterator[None]:
    """Opens the transaction, and rolls it back also where nothing fails."""
    with transaction.open():
        yield
    transaction.roll_back()


@contextmanager
def _in_eval_mode(transaction: Transaction) -> Iterator[None]:
    def evaluate(module: Module) -> None:
        transaction.enter(module)
        module.training = False

    for module in transaction.snapshot.modules:
        module.training = False
    with watching(evaluate):
        yield


def _why_not_comparable(transaction: Transaction) -> str | None:
    if batch_norms(transaction.snapshot.modules):
        return "BatchNorm uses the statistics of the piece"
    if transaction.snapshot.has_drawn_random_numbers():
        return "the function draws random numbers"
    changed = transaction.snapshot.changed_buffers()
    if changed:
        return f"the function changes buffers ({', '.join(changed[:3])})"
    return None
