"""The yardstick of the cases: the same function on the whole mini-batch, in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import anybatch

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6}

Gradients = list[Tensor | None]


def gradients(parameters: Iterable[Tensor]) -> Gradients:
    """Copies of the gradients of `parameters`."""
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def clear(parameters: Iterable[Tensor]) -> None:
    """Set every gradient to None."""
    for parameter in parameters:
        parameter.grad = None


def whole(
    function: Callable[..., Tensor], batch: Mapping[str, Any], parameters: Iterable[Tensor]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients of the whole mini-batch; the gradients are cleared again."""
    parameters = list(parameters)
    clear(parameters)
    loss = function(**batch)
    loss.backward()
    expected = gradients(parameters)
    clear(parameters)
    return loss.detach(), expected


def gradient_error(expected: Gradients, got: Gradients) -> float:
    """The largest difference relative to the largest expected; infinite where None or NaN differ."""
    distance = scale = 0.0
    for a, b in zip(expected, got, strict=True):
        if a is None or b is None:
            distance = distance if a is b else math.inf
            continue
        is_same = (a == b) | (a.isnan() & b.isnan())
        distance = max(distance, float(torch.where(is_same, 0.0, (a - b).abs()).nan_to_num(math.inf).max()))
        scale = max(scale, float(a.nan_to_num(0.0).abs().max()))
    return distance / (scale or 1.0)


def assert_whole(
    function: Callable[..., Tensor],
    batch: Mapping[str, Any],
    module: nn.Module,
    ub_size: int,
    names: list[str] | None = None,
    **options: Any,
) -> None:
    """A call in micro-batches gives the loss and the gradients of the whole mini-batch (Rule 1)."""
    parameters = list(module.parameters())
    expected_loss, expected = whole(function, batch, parameters)
    loss = anybatch.apply(names or list(batch), ub_size=ub_size, **options)(function)(**batch)
    tolerance = TOLERANCES[parameters[0].dtype.to_real()]
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance, equal_nan=True)
    error = gradient_error(expected, gradients(parameters))
    assert error <= tolerance, f"gradient error {error:.2e} at ub_size {ub_size}"
