"""What a count was before it was clamped: `sum / mask.sum().clamp(min=1)`, `sum / max(1, int(positives))`.

A piece in which nothing is positive divides by 1 and adds 0 to what the whole divides by. No graph shows
that. But a dispatch mode sees the clamp, or the count on its way to Python.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.exact.nodes import Constant
from anybatch.exact.reading import Reading

_aten = torch.ops.aten
_CLAMPS = {
    *(_aten.clamp.default, _aten.clamp.Tensor, _aten.clamp_min.default, _aten.clamp_min.Tensor),
    *(_aten.maximum.default, _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf),
    *(_aten.clamp_.default, _aten.clamp_min_.default),
}
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.view.default, _aten.detach.default}
_READS = {_aten._local_scalar_dense.default}
WATCHED = _CLAMPS | _COPIES | _READS


@dataclass(eq=False)
class Clamps:
    """Numbers that were clamped in a run, and numbers that Python has read.

    Attributes:
        results: By address, the results of clamps of one number, and what that was before. Tensors are kept,
            so that no other takes an address over.
        reads: What Python has read of data, and what it was before a clamp.
    """

    results: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)
    reads: list[tuple[float, float]] = field(default_factory=list)

    def see(self, operation: Any, operands: Sequence[Any], result: Any) -> None:
        """Takes note of one of the watched operations."""
        numbers = [one for one in operands if _is_number(one)]
        if operation in _READS:
            self.reads += [(float(one), self._before(one, float(one))) for one in numbers]
        elif operation in _CLAMPS and _is_number(result):
            self.results[result.data_ptr()] = result, _below(float(result), [float(one) for one in numbers])
        elif (
            operation in _COPIES and _is_number(result) and numbers and numbers[0].data_ptr() in self.results
        ):
            self.results[result.data_ptr()] = result, self.results[numbers[0].data_ptr()][1]

    def count(self, divisor: Constant) -> float | None:
        """What a divisor was before it was clamped; None where that is not known."""
        value = float(divisor.value)
        known = (
            self.results.get(divisor.value.data_ptr()) if isinstance(divisor.value, torch.Tensor) else None
        )
        if known is not None:
            return known[1]
        befores = {before for read, before in self.reads if math.isclose(read, value, rel_tol=1e-6)}
        # The count that Python's `max` has passed over is below what came out.
        befores |= {read for read, _ in self.reads if 0 <= read < value} if value == 1 else set()
        return befores.pop() if len(befores) == 1 else None

    def _before(self, number: torch.Tensor, value: float) -> float:
        known = self.results.get(number.data_ptr())
        return known[1] if known else value


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Fills `Clamps` while it is entered."""

    def __init__(self, clamps: Clamps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clamps = clamps

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The default imports torch._dynamo, for seconds (torch 2.13)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in WATCHED:
            self._clamps.see(func, args, result)
        return result


def _below(value: float, operands: Sequence[float]) -> float:
    """What was clamped from below. Of two operands it may be either: the bound of a count is 1."""
    return min([value, *operands]) if len(operands) == 1 or value == 1 else value


def _is_number(value: Any) -> bool:
    """Is it one number of data? Losses, which need a gradient, and comparisons are no counts."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.numel() == 1
        and value.dtype is not torch.bool
        and not value.requires_grad
        and not value.is_complex()
    )


def resolved(readings: Sequence[Reading], clamps: Clamps) -> tuple[Reading, ...]:
    """The readings, with what each term counts where its divisor is a clamp, or may be one."""
    return tuple(_resolved(reading, clamps) for reading in readings)


def _resolved(reading: Reading, clamps: Clamps) -> Reading:
    if not reading.may_clamp:
        return reading
    divisors = [constant for constant in reading.scalars if constant.divides]
    counts = [clamps.count(divisor) for divisor in divisors]
    known = [count for count in counts if count is not None]
    if len(known) != 1:
        return reading
    value = float(divisors[counts.index(known[0])].value)
    return replace(reading, counted=reading.denominator * known[0] / value, is_doubtful=False)
