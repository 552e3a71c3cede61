"""Losses that hold a gradient: double backward through each piece."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

CUTS = [(10, 4), (9, 1), (12, 3), (10, 9)]
Penalty = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _slope(net: nn.Module, point: Tensor) -> Tensor:
    point = point.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(point).sum(), point, create_graph=True)
    return slope


def _wasserstein(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    steepness = _slope(net, (real + fake) / 2).norm(dim=1)
    return net(fake).mean() - net(real).mean() + 10 * (steepness - 1).square().mean()


def _on_real_points(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    penalty = _slope(net, real).square().sum(1).mean()
    return F.softplus(net(fake)).mean() + F.softplus(-net(real)).mean() + 5 * penalty


def _second_derivative(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    point = real.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(point).sum(), point, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), point, create_graph=True)
    return (bend[:, 0] - fake[:, 0]).square().mean()


def _per_row_functions(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    slopes = torch.func.vmap(torch.func.grad(lambda row: net(row)[0]))(real)
    return (slopes - fake).square().sum()


def _along_the_batch_entry(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(net(real).sum(), real, create_graph=True)
    return net(real).square().mean() + slope.square().mean()


PENALTIES = [_wasserstein, _on_real_points, _second_derivative, _per_row_functions]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: penalty.__name__.strip("_"))
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_penalty_on_each_row_is_whole(penalty: Penalty, rows: int, ub_size: int) -> None:
    """A penalty on the slope at each row adds up, and gives the gradient of the whole mini-batch."""
    net = _net()
    batch = {"real": torch.randn(rows, 3), "fake": torch.randn(rows, 3)}
    assert_whole(lambda real, fake: penalty(net, real, fake), batch, net, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_slope_along_an_entry_of_the_batch(rows: int, ub_size: int) -> None:
    """The entry of the batch itself may be what the slope is taken along, and gets its gradient too."""
    net, real = _net(), torch.randn(rows, 3, requires_grad=True)
    loss = _along_the_batch_entry(net, real, real)
    expected = torch.autograd.grad(loss, [*net.parameters(), real])
    call = anybatch.apply(["real"], ub_size)(lambda real: _along_the_batch_entry(net, real, real))
    call(real=real)
    for leaf, gradient in zip([*net.parameters(), real], expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-12)


def _slope_of_the_mean(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    point = real.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(point).mean(), point, create_graph=True)
    return net(fake).mean() + slope.square().sum(1).mean()


def _norm_of_the_gradient(net: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    loss = net(real).square().mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes)


@pytest.mark.parametrize("penalty", [_slope_of_the_mean, _norm_of_the_gradient])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_penalty_that_depends_on_the_whole_is_refused(penalty: Penalty, rows: int, ub_size: int) -> None:
    """A slope of the mean over rows, or of the loss by parameters, is another in each piece: refused."""
    net = _net()
    call = anybatch.apply(["real", "fake"], ub_size)(lambda real, fake: penalty(net, real, fake))
    with pytest.raises(InexactError):
        call(real=torch.randn(rows, 3), fake=torch.randn(rows, 3))
    assert all(parameter.grad is None for parameter in net.parameters())
