"""A loss that the user keeps is not written to and holds its undivided value (pytorch/pytorch#9391)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole


def _regression() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 5), torch.randn(8, 1)
    return nn.Linear(5, 1), {"x": x, "y": y}


def test_kept_losses_hold_the_pieces_own_values() -> None:
    """A loss that the user logs in each piece is that piece's mean."""
    net, batch = _regression()
    kept: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept.append(F.mse_loss(net(x), y))
        return kept[-1]

    anybatch.apply(["x", "y"], ub_size=2, on_inexact="ignore")(step)(**batch)
    assert [loss.item() for loss in kept] == pytest.approx([2.9496, 2.3874, 0.0139, 7.8095], abs=1e-4)


@pytest.mark.parametrize(
    "function", [torch.sqrt, torch.exp, torch.sigmoid, torch.tanh, torch.log1p, torch.square]
)
def test_nonlinear_last_operation_is_refused_and_not_broken(function: object) -> None:
    """A loss whose last operation saved its output is refused for what it is, not by a failing backward."""
    net, batch = _regression()
    call = anybatch.apply(["x", "y"], ub_size=2)(lambda x, y: function(F.mse_loss(net(x), y)))
    with pytest.raises(InexactError):
        call(**batch)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("function", [torch.sqrt, torch.exp, torch.sigmoid, torch.tanh])
@pytest.mark.parametrize("ub_size", [8, 9])
def test_nonlinear_last_operation_in_one_piece_is_exact(function: object, ub_size: int) -> None:
    """In one piece such a loss is what plain PyTorch gives."""
    net, batch = _regression()
    assert_whole(lambda x, y: function(F.mse_loss(net(x), y)), batch, net, ub_size)


@pytest.mark.parametrize("ub_size", [1, 2, 3, 8])
def test_root_per_row_is_exact(ub_size: int) -> None:
    """A root below the mean saves its output and is left alone."""
    net, batch = _regression()
    assert_whole(lambda x, y: (net(x) - y).square().sum(1).sqrt().mean(), batch, net, ub_size)


def test_returned_loss_is_detached_and_its_own_tensor() -> None:
    """The returned loss has no graph, and writing to it changes nothing that the user kept."""
    net, batch = _regression()
    kept: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        kept.append(F.mse_loss(net(x), y))
        return kept[-1]

    for ub_size in (2, 8):
        loss = anybatch.apply(["x", "y"], ub_size=ub_size)(step)(**batch)
        before = [k.item() for k in kept]
        assert loss.grad_fn is None
        assert not loss.requires_grad
        loss.mul_(0)
        assert [k.item() for k in kept] == before
