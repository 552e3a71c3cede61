"""Rows that lie one after another are cut by the lengths that another entry holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.batch import lay_out
from anybatch.batch.lengths import read_lengths
from anybatch.errors import BatchError

from .exactness import CUTS, assert_exact, pieces_of

STEPS = 12


def _lengths(rows: int) -> list[int]:
    return [(3 * row) % 4 + 1 for row in range(rows)]


def _speech(rows: int) -> dict[str, Any]:
    lengths = _lengths(rows)
    return {
        "x": torch.randn(STEPS, rows, 3).double(),
        "targets": torch.randint(1, 5, (sum(lengths),)),
        "input_lengths": [STEPS - row % 3 for row in range(rows)],
        "target_lengths": torch.tensor(lengths),
    }


BATCH_DIM = {"x": 1, "targets": "target_lengths"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_ctc_loss_of_concatenated_targets_equals_the_whole(rows: int, ub_size: int, reduction: str) -> None:
    """Time-major inputs with lists of lengths and targets in one row give the gradient of the whole."""
    network = nn.Linear(3, 5).double()

    def step(x: Tensor, targets: Tensor, input_lengths: list[int], target_lengths: Tensor) -> Tensor:
        assert len(input_lengths) == len(target_lengths) == x.shape[1]
        scores = network(x).log_softmax(dim=-1)
        lengths = torch.tensor(input_lengths)
        return nn.functional.ctc_loss(scores, targets, lengths, target_lengths, reduction=reduction)

    assert_exact(step, _speech(rows), network, ub_size, batch_dim=BATCH_DIM)


def test_undeclared_targets_are_refused_with_the_declaration() -> None:
    """The error of targets that are longer than the batch says how to declare them."""
    way_out = r"lengths in target_lengths: `batch_dim={'targets': 'target_lengths'}`"
    with pytest.raises(BatchError, match=way_out):
        lay_out(_speech(10), batch_dim={"x": 1})


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("kind", ["tensor", "array", "nested"])
def test_rows_stay_in_order(rows: int, ub_size: int, kind: str) -> None:
    """Tensors and arrays, also in containers, are cut where their rows end."""
    lengths = _lengths(rows)
    flat: Any = torch.arange(sum(lengths) * 2).view(-1, 2)
    flat = flat.numpy() if kind == "array" else flat
    value: Any = {"flat": {"a": flat, "b": flat} if kind == "nested" else flat, "lengths": np.array(lengths)}
    pieces = pieces_of(value, ub_size, batch_dim={"batch.flat": "batch.lengths"})
    for name in ("a", "b"):
        found = [piece["flat"][name] if kind == "nested" else piece["flat"] for piece in pieces]
        assert [len(part) for part in found] == [int(piece["lengths"].sum()) for piece in pieces]
        assert np.array_equal(np.concatenate(found), np.asarray(flat))


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_the_rows(rows: int, ub_size: int) -> None:
    """Rows one after another that require grad get their gradient, each at its place."""
    lengths, network = _lengths(rows), nn.Linear(3, 1).double()
    flat = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    batch = {"flat": flat, "lengths": lengths}
    assert_exact(
        lambda flat, lengths: network(flat).pow(2).mean(),
        batch,
        [flat, *network.parameters()],
        ub_size,
        batch_dim={"flat": "lengths"},
    )


@pytest.mark.parametrize("flat", [torch.ones(5), torch.tensor(1.0), torch.ones(6).to_sparse()])
def test_another_number_of_elements_is_refused(flat: Tensor) -> None:
    """An entry must hold as many elements as the lengths say."""
    with pytest.raises(BatchError, match=r"flat is declared to hold one row after another.*6 in all"):
        lay_out({"flat": flat, "lengths": [1, 2, 3]}, batch_dim={"flat": "lengths"})


@pytest.mark.parametrize(
    "lengths", [torch.ones(3), [1, -1], [1.0], "abc", torch.ones(2, 2, dtype=torch.long)]
)
def test_what_are_no_lengths_is_refused(lengths: Any) -> None:
    """Lengths are whole numbers, one per row."""
    assert read_lengths(lengths) is None
    with pytest.raises(BatchError, match=r"`batch_dim`: a path takes.*Got {'flat': 'lengths'}"):
        lay_out({"flat": torch.ones(3), "lengths": lengths}, batch_dim={"flat": "lengths"})


@pytest.mark.parametrize("lengths", [[1, 0, 2], (1, 0, 2), torch.tensor([1, 0, 2]), np.array([1, 0, 2])])
def test_lengths_of_every_kind_are_read(lengths: Any) -> None:
    """Lists, tuples, tensors and arrays hold lengths, 0 among them."""
    assert read_lengths(lengths) == [1, 0, 2]
    layout = lay_out({"flat": torch.arange(3), "lengths": lengths}, batch_dim={"flat": "lengths"})
    assert [layout.cut(row, row + 1)["flat"].tolist() for row in range(3)] == [[0], [], [1, 2]]


def test_outputs_of_time_major_pieces_come_one_by_one() -> None:
    """Outputs whose rows are along another dim than 0 are a list, one entry per piece."""
    network = nn.Linear(3, 5).double()
    step = anybatch.apply(["x"], ub_size=4, batch_dim=1)(lambda x: (network(x).pow(2).mean(), network(x)))
    _, outputs = step(torch.randn(STEPS, 10, 3).double())
    assert [output.shape for output in outputs] == [(STEPS, 4, 5), (STEPS, 3, 5), (STEPS, 3, 5)]
