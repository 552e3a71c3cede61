"""Dicts of tensors, arrays, lists and strings are cut at the same rows (RLinf/RLinf#1500)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch

from .whole import assert_whole

ROWS = 10


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        numbers = torch.tensor([float(name[1:]) for name in batch["ids"]])
        shown = (batch["x"] * self.w).sum() * batch["temperature"]
        return (shown + (batch["x"][:, 0] * numbers).sum() * self.w.sum()) / ROWS


def _batch() -> dict[str, Any]:
    return {
        "x": torch.arange(ROWS).double()[:, None],
        "ids": [f"s{i}" for i in range(ROWS)],
        "array": np.arange(ROWS),
        "meta": {"w": torch.arange(ROWS), "pair": (torch.arange(ROWS), np.arange(ROWS) * 2)},
        "temperature": 0.5,
        "name": "0123456789",
        "none": None,
        "scalar": torch.tensor(3.0),
    }


@pytest.mark.parametrize("ub_size", range(1, 12))
def test_nested_batch_gives_the_known_gradient(ub_size: int) -> None:
    """Every sample keeps its name at every cut: the gradient is 30.75."""
    model = _Model()
    call = anybatch.apply(["batch"], ub_size=ub_size)(lambda batch: model(batch))
    call(batch=_batch())
    assert model.w.grad is not None
    assert model.w.grad.item() == pytest.approx(30.75, abs=1e-10)


@pytest.mark.parametrize("ub_size", [1, 3, 4, 7, 10, 11])
def test_nested_batch_equals_the_whole(ub_size: int) -> None:
    """A dict of everything gives the gradient of the whole dict."""
    model = _Model()
    assert_whole(lambda batch: model(batch), {"batch": _batch()}, model, ub_size)


@pytest.mark.parametrize("ub_size", range(1, 12))
def test_every_entry_is_cut_at_the_same_rows(ub_size: int) -> None:
    """Row i of each tensor, array and list is in the same piece, in order and once; the rest is untouched."""
    model, pieces = _Model(), []

    def step(batch: dict[str, Any]) -> Tensor:
        pieces.append(batch)
        return model(batch)

    anybatch.apply(["batch"], ub_size=ub_size, on_inexact="ignore")(step)(batch=_batch())
    rows = [piece["x"][:, 0].int().tolist() for piece in pieces]
    assert [row for piece in rows for row in piece] == list(range(ROWS))
    for piece, numbers in zip(pieces, rows, strict=True):
        assert piece["ids"] == [f"s{i}" for i in numbers]
        assert isinstance(piece["array"], np.ndarray)
        assert piece["array"].tolist() == numbers
        assert piece["meta"]["w"].tolist() == numbers
        assert isinstance(piece["meta"]["pair"], tuple)
        assert piece["meta"]["pair"][0].tolist() == numbers
        assert piece["meta"]["pair"][1].tolist() == [2 * i for i in numbers]
        assert (piece["temperature"], piece["name"], piece["none"]) == (0.5, "0123456789", None)
        assert piece["scalar"].item() == 3.0


def test_positional_batch_is_the_same_as_one_by_keyword() -> None:
    """A batch may be passed by position."""
    model = _Model()
    call = anybatch.apply(["batch"], ub_size=3)(lambda batch: model(batch))
    call(_batch())
    assert model.w.grad is not None
    assert model.w.grad.item() == pytest.approx(30.75, abs=1e-10)
