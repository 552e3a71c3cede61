"""Entries that belong to no row pass whole, whatever their size looks like (NVIDIA/NeMo-Aligner#6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

NAMED = {
    "rows only": ["x", "y"],
    "and one row for all": ["x", "y", "position"],
    "and a scalar": ["x", "y", "temperature"],
    "and both": ["x", "y", "position", "temperature"],
}


def _problem(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(rows, 3),
        "y": torch.randn(rows, 3),
        "position": torch.randn(1, 3),
        "temperature": torch.tensor(2.0),
        "table": torch.randn(4, 3),
    }
    return nn.Linear(3, 3), batch


def _loss(
    net: nn.Module, x: Tensor, y: Tensor, position: Tensor, temperature: Tensor, table: Tensor
) -> Tensor:
    z = net((x + position) / temperature)
    return (z - y).square().mean() + torch.cdist(z, table).amin(1).mean()


@pytest.mark.parametrize("names", NAMED.values(), ids=list(NAMED))
@pytest.mark.parametrize("rows", [2, 3, 4, 7])
@pytest.mark.parametrize("ub_size", [1, 2, 3, 4])
def test_shared_entries_pass_whole(names: list[str], rows: int, ub_size: int) -> None:
    """A scalar and a single row for all are not cut, named or not; an unnamed table is never looked at."""
    net, batch = _problem(rows)
    assert_whole(lambda **given: _loss(net, **given), batch, net, ub_size, names=names)


@pytest.mark.parametrize("rows", [2, 4, 7])
@pytest.mark.parametrize("ub_size", [1, 2, 3])
def test_table_declared_shared_passes_whole(rows: int, ub_size: int) -> None:
    """A named table declared shared is not cut, also where it has as many rows as the batch."""
    net, batch = _problem(rows)
    assert_whole(
        lambda **given: _loss(net, **given),
        batch,
        net,
        ub_size,
        names=["x", "y", "table"],
        batch_dim={"table": None},
    )


def test_table_inside_a_dict_can_be_declared_shared() -> None:
    """The declaration reaches into a nested batch by its path."""
    net, batch = _problem(4)

    def step(batch: dict[str, Any]) -> Tensor:
        return _loss(net, **batch)

    assert_whole(step, {"batch": batch}, net, 2, batch_dim={"batch.table": None})


@pytest.mark.parametrize("ub_size", [1, 2, 3])
def test_table_of_the_batch_size_is_not_cut_silently(ub_size: int) -> None:
    """A table named by mistake, with the batch's own size, is found out: the loss does not add up."""
    net, batch = _problem(4)
    call = anybatch.apply(["x", "y", "table"], ub_size=ub_size)(lambda **given: _loss(net, **given))
    with pytest.raises(InexactError):
        call(**batch)


def test_shared_entries_give_the_known_loss() -> None:
    """Four rows in pieces of two, a position and a temperature for all: the loss of the whole."""
    net, batch = _problem(4)
    call = anybatch.apply(["x", "y", "position", "temperature"], ub_size=2)(
        lambda **given: _loss(net, **given)
    )
    assert call(**batch).item() == pytest.approx(1.9727106034548623, abs=1e-10)
