"""What the pieces of a call will need, found out before any of them runs."""

import functools
import gc
import sys
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor

from anybatch._rehearse import undone
from anybatch._run import Bound, returned
from anybatch._settings import Settings
from anybatch.batch import Layout, extent, piece_of
from anybatch.batch.parts import Taker
from anybatch.errors import InexactWarning
from anybatch.fit.belongings import Belongings
from anybatch.fit.guard import MemoryVerdict, memory_verdict
from anybatch.fit.need import Corrected, Need, Unknown, corrected
from anybatch.fit.reach import Reach
from anybatch.fit.record import Record
from anybatch.fit.transaction import Transaction
from anybatch.memory.curve import fit_curve
from anybatch.memory.device import is_accelerator, release
from anybatch.memory.malloc import malloc_setting
from anybatch.memory.symbolic import Fakes, SymbolicRun, Untraceable, run_symbolically
from anybatch.memory.trace import Trace
from anybatch.memory.tracker import Tracker

_AGREES_RATIO = 1.002
_BENDS_RATIO = 0.95
_LEAST_ROWS = 3
_KEPT = (
    "`apply`: {function} keeps tensors beyond its call. The run without memory that foresaw its need has "
    "left some of its own there, without values. Give `ub_size` as a number, or don't keep tensors"
)
# What oneDNN keeps of a convolution for each size, forward or backward: 0.1 to 0.8 MiB (torch 2.13).
_KERNEL_BYTES = 1 << 18
# What a malloc that adjusts itself can use of the memory that it holds, at worst.
_RATIO_WITH_GAPS = 0.5
# Up to here most of what malloc keeps for itself is small.
_LARGEST_THRESHOLD_BYTES = 256 << 10


@final
@dataclass(frozen=True, eq=False)
class Task:
    """What a call is to compute.

    Attributes:
        kind: What it has in common with other calls for which the same is known.
        bound: The function and its arguments.
        layout: The mini-batch.
        settings: The options of `apply`.
        reach: The modules and leaves that the function can name.
        device: Where the pieces go; None leaves each tensor where it is.
        transaction: Makes a transaction, not opened yet.
        trains: Is there a backward?
    """

    kind: Hashable
    bound: Bound
    layout: Layout
    settings: Settings
    reach: Reach
    device: torch.device | None
    transaction: Callable[[], Transaction]
    trains: bool

    @property
    def can_be_foreseen(self) -> bool:
        """Are there the rows for it, on one device? A single row takes other operators than more of them.

        Lazy modules have no shape before their first forward.
        """
        is_lazy = any(map(torch.nn.parameter.is_lazy, self._all_leaves))
        return self.layout.rows >= _LEAST_ROWS and not (self.settings.devices or is_lazy)

    @property
    def key(self) -> str:
        """The kind of call, and whose: the same in the next run of a program."""
        function = self.bound.function
        home = getattr(function, "__module__", type(function).__module__)
        elements = sum(parameter.numel() for parameter in self.parameters)
        return _key(f"{home}.{self.bound.name} with {elements} parameters", self.kind)

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The leaves that get gradients, as far as they are known beforehand and have a shape."""
        return [leaf for leaf in self._all_leaves if not torch.nn.parameter.is_lazy(leaf)]

    @cached_property
    def _all_leaves(self) -> list[Tensor]:
        found = {id(leaf): leaf for leaf in self.reach.leaves}
        for module in self.reach.modules:
            found |= {id(leaf): leaf for leaf in module.parameters() if leaf.requires_grad}
        return list(found.values())

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are there now."""
        grads = (parameter.grad for parameter in self.parameters)
        return sum(
            grad.untyped_storage().nbytes()
            for grad in grads
            if grad is not None and grad.layout == torch.strided
        )


@functools.lru_cache(maxsize=256)
def _key(function: str, kind: Hashable) -> str:
    return f"{function}: {kind!r}"


def foresee(task: Task) -> Record:
    """What is known of a kind of call before any piece of it has run."""
    record = Record(_title(task), extent(task.layout), Need(Unknown()), "not known")
    if _leaves_gaps(task.device):
        record.first_ratio, record.has_gaps = record.first_ratio * _RATIO_WITH_GAPS, True
    if not task.can_be_foreseen:
        return record
    try:
        _foresee_symbolically(task, record)
    except Untraceable as error:
        _foresee_by_running(task, record, str(error))
    return record


def _foresee_symbolically(task: Task, record: Record) -> None:
    """Runs two and three rows on fakes.

    Raises:
        Untraceable: That is not possible, or shows too little.
    """

    traces: dict[int, Trace] = {}

    def run(rows: int) -> Trace:
        found = _run_symbolically(task, rows)
        if found.hidden:
            raise Untraceable(found.hidden[0])
        traces[rows] = found.trace
        return found.trace

    record.need.tensors = fit_curve(run)
    _expect_scratch(record.need, traces)
    record.how, record.is_foreseen = "symbolic runs of 2 and 3 rows", True


def _expect_scratch(need: Need, traces: dict[int, Trace]) -> None:
    """Until it is measured, the need holds what convolutions take beside tensors, and keep for each size."""
    with_scratch = {rows: trace.with_scratch() for rows, trace in traces.items()}
    convolutions = sum(amount > 0 for amount in next(iter(traces.values())).scratch_bytes)
    if convolutions:
        need.expected, need.size_bytes = fit_curve(with_scratch.__getitem__), convolutions * _KERNEL_BYTES


def _foresee_by_running(task: Task, record: Record, reason: str) -> None:
    """Runs two and three rows for real, and puts everything back. Where they don't fit, nothing is known."""
    record.confirmed_rows = sys.maxsize
    record.how = f"not known; no symbolic run: {reason}"
    try:
        curve = fit_curve(partial(_run_really, task))
    except Exception as error:  # any error, to ask the one guard about it; the caller's own comes again
        if memory_verdict(error) is MemoryVerdict.NO:
            return
    else:
        record.need.tensors = curve
        record.how, record.is_foreseen = f"runs of 2 and 3 rows; no symbolic run: {reason}", True
        return
    release(task.device)


def confirm(task: Task, record: Record, rows: int) -> bool:
    """Compares the prediction with a symbolic run of so many rows, and corrects it where they differ.

    Returns:
        Was it right?
    """
    if not record.is_foreseen:
        return True
    try:
        seen_bytes = _run_symbolically(task, rows).trace.peak_bytes
    except Untraceable:
        return True
    record.see_confirmation(rows)
    predicted = record.need.tensors
    is_too_low = seen_bytes > predicted.peak_bytes(rows) * _AGREES_RATIO
    # Straight lines between points lie far above what bends, until there is a point near the answer.
    is_too_high = isinstance(predicted, Corrected) and seen_bytes < predicted.peak_bytes(rows) * _BENDS_RATIO
    if is_too_low or is_too_high:
        record.need.tensors = corrected(predicted, rows, seen_bytes)
    return not (is_too_low or is_too_high)


def _run_symbolically(task: Task, rows: int) -> SymbolicRun:
    trackers: list[Tracker] = []

    def run(fakes: Fakes) -> None:
        trackers.append(fakes.tracker)
        for _ in range(_pieces(task, rows)):
            _compute(task, task.layout.take(0, rows, _Faker(fakes, task.device)))

    belongings = Belongings(task.bound.function, task.bound.others())
    try:
        found = run_symbolically(run, task.reach.modules)
    finally:
        has_put_back = belongings.put_back()
    if found.kept and not (has_put_back and _all_died(trackers)):
        warnings.warn(_KEPT.format(function=task.bound.name), InexactWarning, stacklevel=2)
    return found


def _all_died(trackers: list[Tracker]) -> bool:
    """Is nothing of a run left, now that what held fakes was put back?"""
    if any(tracker.living_tensors() for tracker in trackers):
        gc.collect()
    return not any(tracker.living_tensors() for tracker in trackers)


def _run_really(task: Task, rows: int) -> Trace:
    with undone(task.transaction()) as transaction, Tracker() as tracker:
        for _ in range(_pieces(task, rows)):
            piece = piece_of(task.layout, 0, rows, task.device)
            transaction.gradients.make_fresh()
            _compute(task, piece.arguments)
            del piece
        return tracker.trace()


def _pieces(task: Task, rows: int) -> int:
    """How many pieces to run: the second meets the gradients of the first."""
    return 2 if task.trains and rows < task.layout.rows else 1


def _compute(task: Task, arguments: dict[str, Any]) -> None:
    """Forward and backward of one piece, of which nothing is kept."""
    result = returned(task.bound.run(arguments), task.bound.name, needs_graph=task.trains)
    if task.trains:
        torch.autograd.backward(list(result.losses))


class _Faker(Taker):
    """Takes rows as tensors without memory."""

    def __init__(self, fakes: Fakes, device: torch.device | None) -> None:
        self._fakes = fakes
        self._device = device

    def rows_of(self, source: Tensor, dim: int, start: int, rows: int) -> Tensor:
        return self._taken(source.detach().narrow(dim, start, rows), source)

    def element(self, source: Tensor) -> Tensor:
        return self._taken(source.detach(), source)

    def shared(self, source: Tensor) -> Tensor:
        return self._taken(source.detach(), source)

    def _taken(self, rows: Tensor, source: Tensor) -> Tensor:
        stays = self._device is None or rows.device == self._device
        fake = self._fakes.fake(rows, counts=False)
        moved = fake if stays else fake.to(self._device)
        return moved.detach().requires_grad_() if source.requires_grad else moved


def _leaves_gaps(device: torch.device | None) -> bool:
    """Does the memory of the device come from a malloc that keeps much of what is freed?"""
    setting = None if device is not None and is_accelerator(device) else malloc_setting()
    return setting is not None and (setting.is_adjusted or setting.threshold_bytes > _LARGEST_THRESHOLD_BYTES)


def _title(task: Task) -> str:
    shape = "x".join(map(str, extent(task.layout)))
    return (
        f"{task.bound.name}, {'training' if task.trains else 'evaluation'}, rows of {shape or 'one number'}"
    )
