"""The size of the pieces of one call as memory allows: foreseen, measured, corrected."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import final

import torch

from anybatch._fitting import Fitting
from anybatch._foresee import Task, confirm, foresee
from anybatch._shortage import no_piece_fits, no_step_fits
from anybatch.batch import extent
from anybatch.errors import DoesNotFitError
from anybatch.exact.batch_norm import batch_norms
from anybatch.fit.auto import Auto
from anybatch.fit.explanation import GAPS
from anybatch.fit.guard import MemoryVerdict, irrevocable, memory_verdict
from anybatch.fit.record import Record
from anybatch.fit.room import room_in
from anybatch.fit.sums import takes_blocks
from anybatch.memory.device import finish
from anybatch.memory.peak import PeakMeter

__all__ = ["Automatic", "Task"]

_MOST_CONFIRMATIONS = 10
_SMALL_RATIO = 0.2


@final
class Automatic(Fitting):
    """Asks what is known of such calls, and adds to it what this one shows.

    Rows count per device here: where devices share a piece, each holds its part of it.
    """

    def __init__(self, auto: Auto, task: Task) -> None:
        self._auto = auto
        self._task = task
        self._device = task.device or torch.device("cpu")
        self._shares = task.settings.shares
        self._rows = -(-task.layout.rows // self._shares)
        self._norms = batch_norms(part for module in task.reach.modules for part in module.modules())
        self._least_rows = min(self._rows, self._smallest_rows())
        self._divisor = 1
        self._record: Record

    def most_rows(self) -> int:
        record = self._record = self._known()
        state = self._auto.memory(self._device)
        # Without gaps, what malloc holds serves small tensors only.
        state = state if record.has_gaps else replace(state, reusable_bytes=0)
        record.room = room_in(state, self._auto.budget, self._auto.margin)
        if self._task.trains:
            self._auto.optimizers.look_for(self._task.parameters)
            record.step = self._auto.optimizers.cost(self._task.parameters)
            self._check_step(record)
        limit_rows = self._confirmed(record)
        if limit_rows < self._least_rows:
            self._check_fits(record)
        limit_rows = max(limit_rows, self._least_rows)
        self._divisor = self._choose_divisor(record, limit_rows)
        record.rows = max(min(limit_rows, self._rows) // self._divisor, self._least_rows)
        return record.rows * self._shares

    def _known(self) -> Record:
        task = self._task
        keeps = task.can_be_foreseen or bool(task.settings.devices)
        return self._auto.record(task.key, extent(task.layout), lambda: foresee(task), keeps=keeps)

    def after(self, error: BaseException, sizes: Sequence[int]) -> int | None:
        verdict = memory_verdict(error)
        if verdict is MemoryVerdict.NO:
            return None
        rows = -(-max(sizes) // self._shares)
        if rows > self._least_rows:
            next_rows = max(self._record.see_failure(rows), self._least_rows)
            self._record.rows = next_rows
            self._record.reason = f"memory ran out with {rows} rows"
            return next_rows * self._shares
        if verdict is MemoryVerdict.MAYBE:
            error.add_note(self._doubt())
            return None
        raise self._does_not_fit(self._record) from error

    @contextmanager
    def watched(self, sizes: Sequence[int]) -> Iterator[None]:
        record = self._record
        is_known = record.need.is_known(max(self._per_device(sizes)))
        meter = None if is_known else PeakMeter(self._device)
        reusable_bytes = 0 if meter is None else self._auto.memory(self._device).reusable_bytes
        begin_s = time.perf_counter()
        with meter or nullcontext():
            yield
            # The call is committed: nothing that fails from here on may have it made again.
            with irrevocable():
                finish(self._device)
        with irrevocable():
            if len(sizes) > 1:
                record.pace.see(self._divisor, self._rows, time.perf_counter() - begin_s)
            if meter is not None:
                self._see(record, meter, reusable_bytes, sizes)
            record.see_call(self._per_device(sizes))

    def _see(self, record: Record, meter: PeakMeter, reusable_bytes: int, sizes: Sequence[int]) -> None:
        """Takes note of what an attempt took; memory that was freed before it may have been used again."""
        left_bytes = self._auto.memory(self._device).reusable_bytes
        record.has_gaps = record.has_gaps or left_bytes > _SMALL_RATIO * meter.growth_bytes
        # Where there are gaps, it may not have been of use, and counts as taken.
        growth_bytes = meter.growth_bytes + (reusable_bytes if record.has_gaps else 0)
        kept_bytes = meter.end_bytes - meter.begin_bytes + reusable_bytes - left_bytes
        kept_bytes = max(0, kept_bytes - self._task.gradient_bytes())
        # What malloc gave of memory that it had says little about other sizes.
        is_exact = meter.is_marked and reusable_bytes < _SMALL_RATIO * meter.growth_bytes
        record.see_success(self._per_device(sizes), growth_bytes, kept_bytes, is_exact=is_exact)

    def _per_device(self, sizes: Sequence[int]) -> list[int]:
        return [-(-size // self._shares) for size in sizes]

    def _confirmed(self, record: Record) -> int:
        """The size, at which the prediction was compared with a symbolic run of that size."""
        record.sums_bytes = 0
        for _ in range(_MOST_CONFIRMATIONS):
            limit_rows = self._fit(record)
            size = min(limit_rows, self._rows)
            if size <= self._least_rows or record.is_confirmed(size) or confirm(self._task, record, size):
                break
        return limit_rows

    def _fit(self, record: Record) -> int:
        limit_rows = record.fit(self._rows, self._auto.largest or sys.maxsize)
        if not record.sums_bytes and takes_blocks(-(-self._rows // max(1, limit_rows))):
            record.sums_bytes = self._sums_bytes()
            limit_rows = record.fit(self._rows, self._auto.largest or sys.maxsize)
        return limit_rows

    def _sums_bytes(self) -> int:
        """Gradients in float32 are added up in blocks where there are many pieces: one copy more."""
        singles = (leaf for leaf in self._task.parameters if leaf.dtype == torch.float32)
        return sum(leaf.numel() * leaf.element_size() for leaf in singles) if self._task.trains else 0

    def _choose_divisor(self, record: Record, limit_rows: int) -> int:
        """What to divide the ceiling by, for speed."""
        if limit_rows >= self._rows:
            record.reason = "the mini-batch fits whole"
        elif self._auto.prefer == "largest":
            record.reason = "the largest is preferred"
        elif self._norms and self._task.settings.batch_norm == "micro":
            record.reason = "BatchNorm takes its statistics over a piece, which is to be large"
        else:
            return self._fastest(record, limit_rows)
        return 1

    def _fastest(self, record: Record, limit_rows: int) -> int:
        pace = record.pace
        divisor = pace.divisor(limit_rows, self._least_rows)
        is_settled = pace.is_settled(limit_rows, self._least_rows)
        record.reason = (
            "the fastest of those that were tried" if is_settled else "its speed is being measured"
        )
        return divisor

    def _smallest_rows(self) -> int:
        """BatchNorm takes no statistics of a single row; an odd number of rows is not cut by two, then."""
        if not self._norms or self._task.settings.batch_norm == "frozen":
            return 1
        return 2 if self._rows % 2 == 0 else 3

    def _check_fits(self, record: Record) -> None:
        """Raises where it is foreseen, and no call has shown otherwise, that the smallest piece is too large.

        Raises:
            DoesNotFitError: It is.
        """
        room = record.room
        is_known = record.is_foreseen and not record.is_measured
        if is_known and room is not None and room.available_bytes is not None:
            needed_bytes = record.need.peak_bytes(self._least_rows) + record.step.state_bytes
            if needed_bytes > room.available_bytes + room.margin_bytes:
                raise self._does_not_fit(record)

    def _check_step(self, record: Record) -> None:
        """Raises where the step of a given optimizer is beyond the budget, whatever the size of pieces.

        Raises:
            DoesNotFitError: It is.
        """
        room = record.room
        if (
            not self._auto.optimizers.is_given
            or record.is_measured
            or room is None
            or room.available_bytes is None
        ):
            return
        gradient_bytes = sum(leaf.numel() * leaf.element_size() for leaf in self._task.parameters)
        needed_bytes = record.step.step_peak_bytes + gradient_bytes - self._task.gradient_bytes()
        if needed_bytes > room.available_bytes + room.margin_bytes:
            raise no_step_fits(self._task.bound.name, self._device, needed_bytes, room.available_bytes)

    def _doubt(self) -> str:
        return (
            f"`apply`: this error often means that memory ran out, and {self._task.bound.name} met it also "
            f"with the smallest micro-batch. {GAPS if self._record.has_gaps else ''}"
        ).rstrip()

    def _does_not_fit(self, record: Record) -> DoesNotFitError:
        return no_piece_fits(self._task.bound.name, self._device, record, self._least_rows)
