"""Losses that select rows, or themselves, by their values: on some rows that adds up by chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

CUTS = [(8, 4), (10, 4), (9, 1), (12, 3), (24, 2), (24, 5)]
Reduction = Callable[[Tensor], Tensor]


def _switched(losses: Tensor) -> Tensor:
    loss = losses.mean()
    return loss if loss.item() > 1.4 else loss * 0.5


OVER_ROWS: dict[str, Reduction] = {
    "the hardest half": lambda losses: losses.topk(max(len(losses) // 2, 1)).values.mean(),
    "above the mean": lambda losses: losses[losses > losses.detach().mean()].mean(),
    "not below the median": lambda losses: losses[losses >= losses.detach().median()].mean(),
}
PER_ROW: dict[str, Reduction] = {
    "above a threshold": lambda losses: losses[losses > 1.2].sum() / (losses > 1.2).sum().clamp(min=1),
    "hinge": lambda losses: (losses - 1.0).relu().mean(),
}


def _step(net: nn.Module, reduction: Reduction) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: reduction(F.cross_entropy(net(x), y, reduction="none"))


def _problem(rows: int, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    net = nn.Linear(5, 4).double()
    return net, {"x": torch.randn(rows, 5, dtype=torch.float64), "y": torch.randint(4, (rows,))}


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("reduction", OVER_ROWS.values(), ids=list(OVER_ROWS))
def test_selection_over_the_batch_is_refused(reduction: Reduction, rows: int, ub_size: int) -> None:
    """Whatever the data: rows on which the selections agree by chance are not all that is looked at."""
    for seed in range(8):
        net, batch = _problem(rows, seed)
        with pytest.raises(InexactError):
            anybatch.apply(["x", "y"], ub_size=ub_size)(_step(net, reduction))(**batch)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("reduction", PER_ROW.values(), ids=list(PER_ROW))
def test_selection_by_a_threshold_is_exact(reduction: Reduction, rows: int, ub_size: int) -> None:
    """A row that is selected by itself alone is selected in every piece."""
    for seed in range(4):
        net, batch = _problem(rows, seed)
        assert_whole(_step(net, reduction), batch, net, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_loss_switched_by_its_own_value_is_refused_where_pieces_differ(rows: int, ub_size: int) -> None:
    """Where all pieces and the whole take the same branch it is exact, elsewhere refused."""
    branches = set()
    for seed in range(12):
        net, batch = _problem(rows, seed)
        step = _step(net, _switched)
        try:
            assert_whole(step, batch, net, ub_size)
        except InexactError:
            branches.add("refused")
        else:
            branches.add("exact")
    assert "refused" in branches
