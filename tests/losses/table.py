"""What one line of the loss table says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


class Verdict(Enum):
    """What is right for a loss under the default options."""

    EXACT = "loss and gradients are those of the whole mini-batch"
    REFUSED = "an InexactError"
    MAY = "exact, refused or warned about"


@dataclass(frozen=True)
class Loss:
    """A loss, and what a call in micro-batches has to do with it.

    Attributes:
        name: How the test calls it.
        function: The loss; its arguments are looked up by name in `COLUMNS`, `HEADS` and `COEFFICIENTS`.
        verdict: What is right under `weight="auto"`.
        weight: A `weight=` by hand with which the loss is exact; None where there is no obvious one.
        may_warn: Whether an exact result may come with a warning.
        inner: The dtype of parts of the graph, when it is lower than float64.
        wrap: What the user's function goes through before `apply` (a compiler, for instance).
    """

    name: str
    function: Callable[..., Any]
    verdict: Verdict = Verdict.EXACT
    weight: Any = None
    may_warn: bool = False
    inner: torch.dtype | None = None
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = field(default=lambda step: step)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names that the loss asks for."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)


Functions = Mapping[str, Callable[..., Any]]


def exact(functions: Functions, *, weight: Any = None, **options: Any) -> list[Loss]:
    """Losses that equal the whole mini-batch, all with the same weight by hand."""
    return [Loss(name, function, Verdict.EXACT, weight, **options) for name, function in functions.items()]


def refused(functions: Functions, **options: Any) -> list[Loss]:
    """Losses that no cut can reproduce, and of which that can be known."""
    return [Loss(name, function, Verdict.REFUSED, **options) for name, function in functions.items()]


def unclear(functions: Functions, **options: Any) -> list[Loss]:
    """Losses where an exact result, a refusal and a warning are all right, and silence is not."""
    return [Loss(name, function, Verdict.MAY, **options) for name, function in functions.items()]
