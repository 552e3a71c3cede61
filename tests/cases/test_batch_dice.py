"""Dice over the batch is a ratio of sums: no weighting of pieces gives it (BloodAxe/pytorch-toolbelt#99)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError, InexactWarning

from .whole import assert_whole


def _masks(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    filled = torch.linspace(0.02, 0.9, rows).view(-1, 1, 1, 1)
    x, y = torch.randn(rows, 3, 6, 6), (torch.rand(rows, 1, 6, 6) < filled).double()
    return nn.Conv2d(3, 1, 3, padding=1), {"x": x, "y": y}


def _dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def _smooth_dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def _squared_dice(p: Tensor, y: Tensor) -> Tensor:
    return 1 - 2 * (p * y).mean() / (p.square().mean() + y.square().mean())


def _jaccard(p: Tensor, y: Tensor) -> Tensor:
    shared = (p * y).sum()
    return 1 - shared / (p.sum() + y.sum() - shared)


def _tversky(p: Tensor, y: Tensor) -> Tensor:
    hit = (p * y).sum()
    return 1 - hit / (hit + 0.3 * (p * (1 - y)).sum() + 0.7 * ((1 - p) * y).sum())


def _dice_with_cross_entropy(p: Tensor, y: Tensor) -> Tensor:
    return _dice(p, y) + nn.functional.binary_cross_entropy(p, y)


def _log_dice(p: Tensor, y: Tensor) -> Tensor:
    return -(2 * (p * y).sum() / (p.sum() + y.sum())).log()


COUPLED = [_dice, _smooth_dice, _squared_dice, _jaccard, _tversky, _dice_with_cross_entropy, _log_dice]


@pytest.mark.parametrize("form", COUPLED, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize(("rows", "ub_size"), [(8, 2), (8, 4), (8, 1), (7, 3)])
def test_dice_over_the_batch_is_refused(
    form: Callable[[Tensor, Tensor], Tensor], rows: int, ub_size: int
) -> None:
    """Every ratio of sums over the batch is refused, leaves no gradient, and the refusal names a cause."""
    net, batch = _masks(rows)
    call = anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: form(net(x).sigmoid(), y))
    with pytest.raises(InexactError) as refusal:
        call(**batch)
    assert refusal.value.causes
    assert all(p.grad is None for p in net.parameters())


def test_dice_over_the_batch_warns_on_request() -> None:
    """Asked to, the call goes through with one warning and gradients."""
    net, batch = _masks(8)
    call = anybatch.apply(["x", "y"], ub_size=2, on_inexact="warn")(lambda x, y: _dice(net(x).sigmoid(), y))
    with pytest.warns(InexactWarning):
        call(**batch)
    assert all(p.grad is not None for p in net.parameters())


def test_dice_over_the_batch_in_one_piece_is_plain_pytorch() -> None:
    """Nothing is refused when the mini-batch fits in one piece."""
    net, batch = _masks(8)
    loss = anybatch.apply(["x", "y"], ub_size=8)(lambda x, y: _dice(net(x).sigmoid(), y))(**batch)
    assert loss.item() == pytest.approx(0.5192818422049763, abs=1e-10)


def test_dice_per_row_is_exact() -> None:
    """The mean of one ratio per row adds up and is not refused."""
    net, batch = _masks(8)

    def step(x: Tensor, y: Tensor) -> Tensor:
        p, y = net(x).sigmoid().flatten(1), y.flatten(1)
        return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()

    for ub_size in (1, 2, 3):
        assert_whole(step, batch, net, ub_size)
