"""Fewer rows than pieces, no rows at all, and sizes that are none (pytorch/PiPPy#795)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import BatchError

from .whole import assert_whole


def _regression(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(3, 4), torch.randn(3, 1)
    return nn.Linear(4, 1), {"x": x[:rows], "y": y[:rows]}


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("ub_size", range(1, 9))
def test_few_rows_equal_the_whole(rows: int, ub_size: int) -> None:
    """Any number of rows runs at any size."""
    net, batch = _regression(rows)
    assert_whole(lambda x, y: F.mse_loss(net(x), y), batch, net, ub_size)


@pytest.mark.parametrize("ub_size", range(1, 9))
def test_few_rows_give_the_known_loss_and_no_empty_piece(ub_size: int) -> None:
    """Three rows give the loss of three rows, and the function never sees an empty piece."""
    net, batch = _regression(3)
    sizes: list[int] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return F.mse_loss(net(x), y)

    loss = anybatch.apply(["x", "y"], ub_size=ub_size)(step)(**batch)
    assert loss.item() == pytest.approx(0.4242666865524771, abs=1e-10)
    assert min(sizes) >= 1


@pytest.mark.parametrize("ub_size", [1, 4])
def test_no_rows_are_refused_before_anything_runs(ub_size: int) -> None:
    """An empty mini-batch is a `BatchError`, the function is not called and no gradient appears."""
    net, batch = _regression(0)
    calls: list[int] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return F.mse_loss(net(x), y)

    with pytest.raises(BatchError):
        anybatch.apply(["x", "y"], ub_size=ub_size)(step)(**batch)
    assert calls == []
    assert net.weight.grad is None


@pytest.mark.parametrize("ub_size", [0, -1, -8, True, False, 2.5, 4.0, "4", None])
def test_size_that_is_none_is_refused_at_decoration(ub_size: Any) -> None:
    """A size that is no positive whole number is refused before there is a call."""
    with pytest.raises(ValueError, match="ub_size"):
        anybatch.apply(["x"], ub_size=ub_size)
