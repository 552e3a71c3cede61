"""Custom autograd Functions that weights go through: rounding, and one that takes in data unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

CUTS = [(10, 4), (9, 1), (12, 3), (10, 9)]


class _Rounded(Function):
    """Weights of few digits, with the gradient of the weights themselves."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, step: float) -> Tensor:
        return (weight / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ScaledByTheBatch(Function):
    """Weights times the mean of some rows, which come in a list and leave no edge in the graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: list[Tensor]) -> Tensor:
        ctx.scale = rows[0].mean(0)
        return weight * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


def _batch(rows: int) -> dict[str, Tensor]:
    label = torch.randint(4, (rows,))
    label[1::3] = -100
    return {"x": torch.randn(rows, 3), "label": label}


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows": lambda weight, x, label: F.cross_entropy(x @ weight.T, label),
    "rows and decay": lambda weight, x, label: F.cross_entropy(x @ weight.T, label) + weight.square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_rounded_weights_couple_no_rows(loss: str, rows: int, ub_size: int) -> None:
    """A model that trains rounded weights is exact, with a decay of the rounded ones as well."""
    layer = nn.Linear(3, 4, bias=False)

    def step(x: Tensor, label: Tensor) -> Tensor:
        return LOSSES[loss](_Rounded.apply(layer.weight, 0.1), x, label)

    assert_whole(step, _batch(rows), layer, ub_size)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_weights_scaled_by_the_batch_are_refused(rows: int, ub_size: int, seed: int) -> None:
    """A Function that hides rows of the batch in its arguments is refuted by numbers (Rule 1)."""
    torch.manual_seed(seed)
    layer, batch = nn.Linear(3, 4, bias=False), _batch(rows)
    batch["label"].clamp_(min=0)
    call = anybatch.apply(["x", "label"], ub_size)(
        lambda x, label: F.cross_entropy(x @ _ScaledByTheBatch.apply(layer.weight, [x]).T, label)
    )
    with pytest.raises(InexactError):
        call(**batch)
    assert layer.weight.grad is None
