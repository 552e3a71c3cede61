"""What is nan or infinite goes through, with the gradients that plain PyTorch gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .whole import assert_whole

CUTS = [(8, 4), (10, 4), (9, 1), (12, 3)]
IGNORED = -100
Form = Callable[[Tensor, Tensor], Tensor]

COEFFICIENTS: dict[str, Callable[[float], Form]] = {
    "times": lambda value: lambda z, y: F.cross_entropy(z, y) * value,
    "divided by": lambda value: lambda z, y: F.cross_entropy(z, y) / value,
    "divided by a tensor": lambda value: lambda z, y: F.cross_entropy(z, y) / torch.tensor(value),
    "plus": lambda value: lambda z, y: F.cross_entropy(z, y) + value,
    "one of two terms": lambda value: lambda z, y: F.cross_entropy(z, y) + value * z.square().mean(),
}


def _problem(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    y = torch.arange(rows) % 3
    y[2::4] = IGNORED
    return nn.Linear(5, 3).double(), {"x": torch.randn(rows, 5, dtype=torch.float64), "y": y}


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("form", COEFFICIENTS.values(), ids=list(COEFFICIENTS))
def test_coefficient_that_is_not_finite(
    form: Callable[[float], Form], value: float, rows: int, ub_size: int
) -> None:
    """A coefficient of a learned temperature that blew up is no question of how the loss adds up."""
    net, batch = _problem(rows)
    loss = form(value)
    assert_whole(lambda x, y: loss(net(x), y), batch, net, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 3, -1])
def test_row_that_is_not_finite(row: int, value: float, rows: int, ub_size: int) -> None:
    """A broken row makes of the loss and the gradients what it makes of those of the whole mini-batch."""
    net, batch = _problem(rows)
    batch["x"][row, 2] = value
    assert_whole(lambda x, y: F.cross_entropy(net(x), y), batch, net, ub_size)
    assert_whole(lambda x, y: F.cross_entropy(net(x), y) + net(x).square().mean(), batch, net, ub_size)
