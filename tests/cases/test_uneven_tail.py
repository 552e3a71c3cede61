"""A last piece that is smaller weighs less, whatever the sizes (keras-team/keras#20241)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import assert_whole

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "mean of rows": lambda z, y: (z - y).square().sum(1).mean(),
    "sum over rows": lambda z, y: (z - y).square().sum() / len(z),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, (y > 0).to(z.dtype)),
}


def _regression(rows: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(rows, 5)
    y = torch.randn(rows, 1) * torch.arange(1, rows + 1)[:, None]
    net = nn.Linear(5, 1)
    return net.to(dtype), {"x": x.to(dtype), "y": y.to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 10, 13])
def test_uneven_cut_of_every_size(form: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> None:
    """Every row weighs the same in every cut from single rows to more than the whole mini-batch."""
    net, batch = _regression(rows, dtype)
    for ub_size in range(1, rows + 3):
        assert_whole(lambda x, y: form(net(x), y), batch, net, ub_size)


@pytest.mark.parametrize("ub_size", range(1, 13))
def test_uneven_cut_gives_the_known_loss(ub_size: int) -> None:
    """The loss of ten rows is that of the whole mini-batch at every cut."""
    net, batch = _regression(10, torch.float64)
    loss = anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.mse_loss(net(x), y))(**batch)
    assert loss.item() == pytest.approx(34.84875633938149, rel=1e-10)


@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (29, 8), (13, 5), (7, 3), (5, 4)])
def test_every_row_comes_once_and_in_order(rows: int, ub_size: int) -> None:
    """No row is dropped, repeated or moved (Rule 2), and no piece is larger than the limit."""
    weight = nn.Parameter(torch.ones(()))
    seen: list[list[float]] = []

    def step(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        return (weight * x).mean()

    anybatch.apply(["x"], ub_size=ub_size, on_inexact="ignore")(step)(x=torch.arange(float(rows)))
    assert [value for piece in seen for value in piece] == list(range(rows))
    assert max(map(len, seen)) <= ub_size
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx((rows - 1) / 2, rel=1e-12)
