"""What the pieces of a call will need, found out before any of them runs."""

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from anybatch._run import Bound, returned
from anybatch._settings import Settings
from anybatch.batch import Layout, extent
from anybatch.batch.parts import Taker
from anybatch.fit.need import Need, corrected
from anybatch.fit.reach import Reach
from anybatch.fit.record import Record
from anybatch.fit.transaction import Transaction
from anybatch.memory.curve import fit_curve
from anybatch.memory.symbolic import Fakes, Untraceable, run_symbolically
from anybatch.memory.trace import Trace

_AGREES_RATIO = 1.002


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
    def key(self) -> str:
        """The kind of call, and whose: the same in the next run of a program."""
        function = self.bound.function
        home = getattr(function, "__module__", type(function).__module__)
        elements = sum(parameter.numel() for parameter in self.parameters)
        return f"{home}.{self.bound.name} with {elements} parameters: {self.kind!r}"

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The leaves that get gradients, as far as they are known beforehand."""
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


def foresee(task: Task) -> Record:
    """What is known of a kind of call before any piece of it has run."""
    title = _title(task)
    try:
        curve = fit_curve(lambda rows: _trace(task, min(rows, task.layout.rows)))
    except Untraceable as error:
        return Record(title, extent(task.layout), Need(_Unknown()), f"not known: {error}", is_foreseen=False)
    return Record(title, extent(task.layout), Need(curve), "symbolic runs of 2 and 3 rows")


def confirm(task: Task, record: Record, rows: int) -> bool:
    """Compares the prediction with a symbolic run of so many rows, and corrects it where they differ.

    Returns:
        Was it right?
    """
    if not record.is_foreseen:
        return True
    try:
        seen_bytes = _trace(task, rows).peak_bytes
    except Untraceable:
        return True
    record.confirmed_rows = max(record.confirmed_rows, rows)
    if seen_bytes <= record.need.tensors.peak_bytes(rows) * _AGREES_RATIO:
        return True
    record.need.tensors = corrected(record.need.tensors, rows, seen_bytes)
    return False


def _trace(task: Task, rows: int) -> Trace:
    """Runs two pieces of so many rows symbolically: the second meets the gradients of the first."""
    pieces = 2 if task.trains and rows < task.layout.rows else 1

    def run(fakes: Fakes) -> None:
        for _ in range(pieces):
            arguments = task.layout.take(0, rows, _Faker(fakes, task.device))
            result = returned(task.bound.run(arguments), task.bound.name, needs_graph=task.trains)
            if task.trains:
                torch.autograd.backward(list(result.losses))

    return run_symbolically(run, task.reach.modules).trace


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


class _Unknown:
    """Nothing is known: every size may fit."""

    def peak_bytes(self, rows: int) -> int:
        return 0

    def largest_rows(self, budget_bytes: int) -> int:
        return sys.maxsize


def _title(task: Task) -> str:
    shape = "x".join(map(str, extent(task.layout)))
    return (
        f"{task.bound.name}, {'training' if task.trains else 'evaluation'}, rows of {shape or 'one number'}"
    )
