"""Rows of which nothing counts: in a loss over the number of rows they are counted, and in no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .whole import assert_whole

KEPT = {
    "one at the end is not": [1, 1, 1, 1, 1, 1, 1, 1, 0],
    "the first alone": [1, 0, 0, 0, 0, 0, 0, 0, 0],
    "the last two": [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    "some": [1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1],
}
LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "selected, over the rows": lambda net, x, k: _squares(net, x)[k].sum() / len(x),
    "masked, over the rows": lambda net, x, k: (_squares(net, x) * k).sum() / len(x),
    "selected before the model, over the rows": lambda net, x, k: _squares(net, x[k]).sum() / len(x),
    "over ten times the rows": lambda net, x, k: _squares(net, x[k]).sum() / (10 * len(x)),
    "masked, over the count": lambda net, x, k: (_squares(net, x) * k).sum() / k.sum().clamp(min=1),
    "masked, over twice the count": lambda net, x, k: (
        (_squares(net, x) * k).sum() / (2 * k.sum().clamp(min=1))
    ),
    "selected before the model, over the count": lambda net, x, k: (
        _squares(net, x[k]).sum() / max(1, int(k.sum()))
    ),
    "beside a mean": lambda net, x, k: _squares(net, x).mean() + (_squares(net, x) * k).sum() / len(x),
}


def _squares(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum(dim=1)


# Where as many rows came through a selection in both, the graph does not tell rows from parameters.
@pytest.mark.filterwarnings("ignore:.*another graph for another number of rows")
@pytest.mark.parametrize("ub_size", [1, 2, 4])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_of_which_nothing_counts(
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor], kept: list[int], ub_size: int
) -> None:
    """Whether such rows are counted shows on rows that are beside others, for pieces of one row too."""
    net = nn.Linear(3, 2)
    batch = {"x": torch.randn(len(kept), 3), "k": torch.tensor(kept).bool()}
    assert_whole(lambda x, k: loss(net, x, k), batch, net, ub_size)


@pytest.mark.parametrize("ub_size", [1, 2, 4])
def test_rows_that_hold_nothing(ub_size: int) -> None:
    """Rows one after another, some of length 0: a sum over them, over the number of rows."""
    net, lengths = nn.Linear(3, 2), torch.tensor([2, 0, 3, 1, 0, 0, 1, 2, 0])
    batch = {"t": torch.randn(9, 3), "n": lengths}
    assert_whole(lambda t, n: _squares(net, t).sum() / len(n), batch, net, ub_size, batch_dim={"t": "n"})
