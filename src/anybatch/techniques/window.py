"""The calls between two steps of an optimizer: their gradients, weighted by rows, and the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.errors import TechniqueError


@final
class Window:
    """Accumulates gradients of calls into that of all their rows, and steps.

    Gradients stay in the scale of the first call of a window: as long as all have as many rows as that, they
    are added up by torch itself, and multiplied once, at the step. A call of another size gets gradients of
    its own, which takes memory for one more of each meanwhile.

    Attributes:
        steps: How many steps were made, also where a scaler left one out for gradients that were not finite.
    """

    def __init__(
        self,
        calls: int,
        optimizer: Optimizer,
        scheduler: Any = None,
        scaler: GradScaler | None = None,
        before_step: Callable[[], object] | None = None,
    ) -> None:
        self.steps = 0
        self._wanted = calls
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler
        self._before_step = before_step
        self._rows: list[float] = []
        optimizer.zero_grad()

    @contextmanager
    def call(self, rows: float) -> Iterator[None]:
        """A context for forward and backward of one mini-batch; at its end a full window is stepped.

        A call that raises does not count, and the gradients of those before it are as they were where it has
        another number of rows, or leaves them alone itself as `apply` does.

        Args:
            rows: How many rows it has; or what its loss divides by, above 0.

        Raises:
            TechniqueError: `rows` is not above 0.
        """
        _check_rows(rows)
        if self._rows and rows != self._rows[0]:
            with self._aside(rows / self._rows[0]):
                yield
        else:
            yield
        self._rows.append(rows)
        if len(self._rows) == self._wanted:
            self.step()

    def step(self) -> None:
        """Steps with the gradient of all rows since the last step; does nothing where there are none."""
        if not self._rows:
            return
        self._scale(self._rows[0] / sum(self._rows))
        was_made = self._stepped()
        self._rows.clear()
        self.steps += 1
        self._optimizer.zero_grad()
        if was_made and self._scheduler is not None:
            self._scheduler.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Steps a window that has ended early; but not after an error."""
        if kind is None:
            self.step()

    def _stepped(self) -> bool:
        """Steps as the caller's loop would; False where the scaler left the step out."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._before_step is not None:
            self._before_step()
        if self._scaler is None:
            self._optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= before  # it is lowered when a step is left out

    @contextmanager
    def _aside(self, share: float) -> Iterator[None]:
        """What was accumulated is put aside, and a share of what comes is added to it."""
        parameters = self._parameters()
        held = [each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        try:
            yield
        except BaseException:
            for each, before in zip(parameters, held, strict=True):
                each.grad = before
            raise
        with torch.no_grad():
            for each, before in zip(parameters, held, strict=True):
                each.grad = _sum(before, each.grad, share)

    def _scale(self, ratio: float) -> None:
        if ratio == 1:
            return
        with torch.no_grad():
            for each in self._parameters():
                if each.grad is not None:
                    each.grad.mul_(ratio)

    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]


def _sum(before: Tensor | None, gradient: Tensor | None, share: float) -> Tensor | None:
    if gradient is None:
        return before
    if before is None:
        return gradient.mul_(share)
    if before.layout == gradient.layout == torch.strided:
        return before.add_(gradient, alpha=share)
    part = gradient * share
    return before + part if before.layout == torch.strided else part + before


def _check_rows(rows: Any) -> None:
    is_number = isinstance(rows, (int, float)) and not isinstance(rows, bool)
    if not (is_number and 0 < rows < float("inf")):
        raise TechniqueError(
            f"`Accumulation`: each call counts by its rows, above 0. Got rows={rows!r}. Give how many rows "
            f"the mini-batch has."
        )
