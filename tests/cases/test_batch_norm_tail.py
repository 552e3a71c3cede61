"""A cut leaves no piece of one row, which BatchNorm refuses in training (fastai/fastai#1352)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactWarning

from .whole import assert_whole


def _problem(rows: int) -> tuple[nn.Sequential, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    return net, {"x": torch.randn(rows, 4), "y": torch.randn(rows, 1)}


@pytest.mark.parametrize(("rows", "ub_size"), [(9, 4), (5, 4), (9, 3), (7, 3), (10, 9), (33, 16)])
def test_ragged_cut_trains_through_batch_norm(rows: int, ub_size: int) -> None:
    """No piece has one row where the limit allows, and a warning names the layer that sees pieces."""
    net, batch = _problem(rows)
    sizes: list[int] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return F.mse_loss(net(x), y)

    with pytest.warns(InexactWarning, match="1"):
        anybatch.apply(["x", "y"], ub_size=ub_size)(step)(**batch)
    pieces = -(-rows // ub_size)
    assert sum(sizes[-pieces:]) == rows
    assert min(sizes[-pieces:]) >= 2
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("ub_size", [1, 2, 4, 8])
def test_batch_norm_in_eval_mode_is_exact(ub_size: int) -> None:
    """Frozen statistics couple no rows: exact at every cut, single rows included, and without a warning."""
    net, batch = _problem(9)
    net(batch["x"])
    net.eval()
    before = copy.deepcopy(net.state_dict())
    assert_whole(lambda x, y: F.mse_loss(net(x), y), batch, net, ub_size)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_refusal_of_batch_norm_leaves_nothing_behind() -> None:
    """With single rows torch's own error passes unchanged; gradients and statistics are as before."""
    net, batch = _problem(9)
    before = copy.deepcopy(net.state_dict())
    call = anybatch.apply(["x", "y"], ub_size=1, on_inexact="ignore")(lambda x, y: F.mse_loss(net(x), y))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        call(**batch)
    assert all(p.grad is None for p in net.parameters())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
