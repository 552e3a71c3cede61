"""A sum is not divided by the number of pieces, also when the user divides it by a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .whole import assert_whole

SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reduction sum": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "sum by hand": lambda z, y: (z - y).square().sum(),
    "sum / 100": lambda z, y: (z - y).square().sum() / 100,
    "sum * 0.01": lambda z, y: (z - y).square().sum() * 0.01,
    "sum / a tensor": lambda z, y: (z - y).square().sum() / torch.tensor(100.0, dtype=z.dtype),
    "sum of means": lambda z, y: (z - y).square().mean(1).sum(),
    "mean times rows": lambda z, y: F.mse_loss(z, y) * len(z),
    "sum of sums": lambda z, y: F.l1_loss(z, y, reduction="sum") + 2 * z.square().sum(),
    "sum over rows, mean over features": lambda z, y: (z - y).square().sum(0).mean(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("weight", ["auto", "sum"])
@pytest.mark.parametrize("form", SUMS.values(), ids=list(SUMS))
def test_sum_keeps_its_size(
    form: Callable[[Tensor, Tensor], Tensor], weight: str, dtype: torch.dtype
) -> None:
    """Sums add up over pieces, found by themselves or declared with `weight="sum"`."""
    net = nn.Linear(5, 2).to(dtype)
    for rows, ub_size in ((8, 2), (8, 8), (7, 3), (5, 1)):
        batch = {"x": torch.randn(rows, 5).to(dtype), "y": torch.randn(rows, 2).to(dtype)}
        assert_whole(lambda x, y: form(net(x), y), batch, net, ub_size, weight=weight)


@pytest.mark.parametrize("ub_size", [1, 2, 3])
def test_sum_next_to_a_mean(ub_size: int) -> None:
    """A sum and a mean in one loss are scaled each by its own."""
    net = nn.Linear(5, 2)
    batch = {"x": torch.randn(8, 5), "y": torch.randn(8, 2)}

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = net(x)
        return F.mse_loss(z, y) + 0.01 * z.abs().sum()

    assert_whole(step, batch, net, ub_size)
