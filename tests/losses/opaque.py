"""Losses that hide what they divide by, losses that tell it, and losses that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Loss, exact, refused, unclear


def _closed(
    value: Callable[[Tensor, Tensor], Tensor], *, tells: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss as one custom operator, as a fused kernel is: nothing of it is in the graph."""

    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = z.detach().requires_grad_()
                loss = value(leaf, y)
                (ctx.slope,) = torch.autograd.grad(loss, leaf)
            if tells:
                ctx.anybatch_denominator = (y > 0).sum()
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * ctx.slope, None

    return lambda z, y: Closed.apply(z, y)


def _mean_of_positive(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y).square() * (y > 0)).sum() / (y > 0).sum()


def _sample(z: Tensor, z2: Tensor, y: Tensor) -> Tensor:
    sample = z + (0.5 * z2).exp() * torch.randn_like(z)
    divergence = 0.5 * (z.square() + z2.exp() - 1 - z2).sum(1).mean()
    return F.mse_loss(sample, y) + 0.1 * divergence


_telling = _closed(_mean_of_positive, tells=True)
_closed_mean = _closed(lambda z, y: F.mse_loss(z, y))

OPAQUE: list[Loss] = [
    *exact({"closed, tells its denominator": _telling}, weight=lambda y: (y > 0).sum()),
    *exact(
        {"closed, tells its denominator, + mean": lambda z, y, z2: _telling(z, y) + 0.3 * F.l1_loss(z2, y)}
    ),
    *unclear({"closed mean": _closed_mean}, weight="rows"),
    *unclear({"closed sum": _closed(lambda z, y: F.mse_loss(z, y, reduction="sum"))}, weight="sum"),
    *unclear({"closed mean of the positive": _closed(_mean_of_positive)}, weight=lambda y: (y > 0).sum()),
    *unclear(
        {"closed mean + mean": lambda z, z2, y: _closed_mean(z, y) + 0.3 * F.l1_loss(z2, y)},
        weight="rows",
    ),
    *refused(
        {
            "closed root of the mean": _closed(lambda z, y: F.mse_loss(z, y).sqrt()),
            "closed ratio of sums": _closed(lambda z, y: (z * y).exp().sum() / z.exp().sum()),
            "closed pairs": _closed(lambda z, y: torch.cdist(z, y).mean()),
        }
    ),
    *exact(
        {"numpy weights per row": lambda z, y: (torch.from_numpy(y.numpy() ** 2) * (z - y).abs()).mean()},
        weight="rows",
    ),
    *unclear(
        {
            "dropout, functional": lambda z, y: F.mse_loss(F.dropout(z, 0.5, training=True), y),
            "noise on the input": lambda net, x, z, y: (
                F.mse_loss(net["z"](x + torch.randn_like(x)), y) + 0 * z.sum()
            ),
            "noise on the target": lambda z, y: F.mse_loss(z, y + 0.1 * torch.randn_like(y)),
            "noise of one draw": lambda z, y: F.mse_loss(z, y + torch.randn(())),
            "reparametrised": _sample,
            "random mask": lambda z, y: ((z - y).abs() * (torch.rand_like(y) < 0.5)).mean(),
            "random rows dropped": lambda z, y: (z - y)[torch.rand(len(z)) < 0.7].abs().sum() / len(z),
            "gumbel": lambda z, y: (F.gumbel_softmax(z, hard=True) * y).sum(1).mean(),
            "random weight": lambda z, y: torch.rand(()) * F.mse_loss(z, y),
        }
    ),
]
