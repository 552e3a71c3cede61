"""The whole mini-batch by plain PyTorch, the same call in micro-batches, and how far apart they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import anybatch
from anybatch.errors import InexactError, InexactWarning

from .columns import mini_batch
from .networks import HEADS, Problem
from .table import Loss

EXACT = 1e-10
SEED = 11

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Result:
    """What one run of a loss left behind.

    Attributes:
        loss: The returned loss; the sum of the entries where it is a mapping. None when the call was refused.
        gradients: The gradient of each parameter of the problem.
        refusal: The `InexactError`, when the call was refused.
        warned: Whether an `InexactWarning` came.
        moved_random_state: Whether a refused call left torch's random state changed.
    """

    loss: Tensor | None
    gradients: Gradients
    refusal: InexactError | None = None
    warned: bool = False
    moved_random_state: bool = False


@dataclass(frozen=True)
class Case:
    """A loss with the problem it belongs to and its mini-batches, one per row count."""

    loss: Loss
    problem: Problem
    batches: tuple[dict[str, Tensor], ...]

    @property
    def names(self) -> list[str]:
        """The named arguments of the call."""
        return list(self.batches[0])

    @property
    def step(self) -> Callable[..., Any]:
        """The user's function: the networks, then the loss."""
        problem, function, names = self.problem, self.loss.function, self.loss.arguments

        def step(**columns: Tensor) -> Any:
            given = problem(**columns)
            return function(**{name: given[name] for name in names})

        return step


def case_of(loss: Loss, rows: Sequence[int]) -> Case:
    """Set up a loss with one mini-batch for each of `rows`."""
    problem = Problem(loss.arguments)
    asked = [name for name in loss.arguments if name not in problem.outputs]
    columns = dict.fromkeys([*(HEADS[head][1] for head in problem.heads), *asked])
    return Case(loss, problem, tuple(mini_batch(columns, n, seed) for seed, n in enumerate(rows)))


def gradients_of(problem: Problem) -> Gradients:
    """Copies of the gradients by parameter name."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in problem.named_parameters()}


def total(loss: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The loss, or the sum of a mapping of losses."""
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, Mapping) else loss


def whole(case: Case) -> Result:
    """Run the mini-batches whole, one after the other, in plain PyTorch."""
    problem = case.problem
    problem.zero_grad(set_to_none=True)
    for columns in case.batches:
        torch.manual_seed(SEED)
        loss = total(case.step(**columns))
        loss.backward()
    return Result(loss.detach(), gradients_of(problem))


def in_pieces(case: Case, ub_size: int, **options: Any) -> Result:
    """Run the mini-batches through `anybatch.apply`, one after the other."""
    problem = case.problem
    problem.zero_grad(set_to_none=True)
    call: Callable[..., Any] = anybatch.apply(case.names, ub_size=ub_size, **options)(
        case.loss.wrap(case.step)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for columns in case.batches:
            torch.manual_seed(SEED)
            before = torch.get_rng_state()
            try:
                loss = total(call(**columns))
            except InexactError as refusal:
                is_moved = not torch.equal(before, torch.get_rng_state())
                return Result(None, gradients_of(problem), refusal, moved_random_state=is_moved)
    return Result(loss, gradients_of(problem), warned=any(w.category is InexactWarning for w in caught))


def largest(gradients: Gradients) -> float:
    """The largest finite gradient entry; the least positive float where there is none."""
    entries = [
        g[g.isfinite()].abs().max() for g in gradients.values() if g is not None and g.isfinite().any()
    ]
    return max((float(entry) for entry in entries), default=0.0) or math.ulp(0.0)


def _distance(expected: Tensor | None, got: Tensor | None) -> float:
    if expected is None or got is None:
        return 0.0 if expected is got else math.inf
    expected, got = expected.detach().double(), got.detach().double()
    is_same = (expected == got) | (expected.isnan() & got.isnan())
    difference = torch.where(is_same, 0.0, (expected - got).abs())
    return float(difference.nan_to_num(nan=math.inf).max()) if difference.numel() else 0.0


def gradient_error(expected: Result, got: Result) -> float:
    """The largest difference relative to the largest gradient; infinite where None or NaN differ."""
    pairs = [(expected.gradients[name], got.gradients[name]) for name in expected.gradients]
    distance = max(_distance(a, b) for a, b in pairs)
    return distance / largest(expected.gradients) if distance else 0.0


def loss_error(expected: Result, got: Result) -> float:
    """The difference of the losses, relative to the loss or to the largest gradient, whichever is larger."""
    distance = _distance(expected.loss, got.loss)
    scale = max(abs(float(expected.loss.nan_to_num())), largest(expected.gradients)) if distance else 1.0
    return distance / scale


def error(expected: Result, got: Result) -> float:
    """The larger of the two errors."""
    return max(gradient_error(expected, got), loss_error(expected, got))


def allowed_error(case: Case, expected: Result) -> float:
    """Rule 1: 1e-10 in float64; twice the whole batch's own rounding error where the graph holds less.

    The own error is at least the unit roundoff of the lower dtype: that a value happens to be representable
    is no promise.
    """
    if case.loss.inner is None:
        return EXACT
    return 2 * max(torch.finfo(case.loss.inner).eps / 2, error(_without_casts(case), expected))


def _without_casts(case: Case) -> Result:
    with _CastsIgnored():
        return whole(case)


class _CastsIgnored(torch.overrides.TorchFunctionMode):
    """Leaves float64 alone where a function asks for less."""

    _CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._CASTS:
            return args[0]
        return function(*args, **(kwargs or {}))
