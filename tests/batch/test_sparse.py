"""Sparse COO tensors are cut by their first dim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.batch import feed, join, lay_out
from anybatch.errors import BatchError

from .exactness import CUTS, assert_exact, pieces_of


def _sparse(rows: int, *, coalesced: bool = True, dense_dims: int = 0) -> Tensor:
    count = 3 * rows
    place = torch.stack([torch.arange(count) * 7 % rows, torch.arange(count) * 5 % 6])
    values = torch.randn(count, *[2] * dense_dims, dtype=torch.float64)
    size = (rows, 6, *[2] * dense_dims)
    x = torch.sparse_coo_tensor(place, values, size, check_invariants=True)
    return x.coalesce() if coalesced else x


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_sparse_batch_equals_the_whole(rows: int, ub_size: int, coalesced: bool) -> None:
    """A linear layer on sparse rows gets the gradient of the whole."""
    weight = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return ((torch.sparse.mm(x, weight).tanh() - y) ** 2).mean()

    batch = {"x": _sparse(rows, coalesced=coalesced), "y": torch.randn(rows, 2).double()}
    assert_exact(step, batch, [weight], ub_size)


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_rows_stay_in_order(rows: int, ub_size: int, dense_dims: int, coalesced: bool) -> None:
    """Every row comes once and in order, coalesced where it was; so does what joins the pieces."""
    x = _sparse(rows, coalesced=coalesced, dense_dims=dense_dims)
    pieces = pieces_of(x, ub_size)
    assert torch.equal(torch.cat([piece.to_dense() for piece in pieces]), x.to_dense())
    joined = join(pieces, [len(piece) for piece in pieces], None)
    assert torch.equal(joined.to_dense(), x.to_dense())
    assert joined.coalesce()._nnz() == x.coalesce()._nnz()
    if coalesced:
        assert all(piece.is_coalesced() for piece in [*pieces, joined])
        assert torch.equal(joined.indices(), x.indices())


def test_rows_without_elements_are_rows() -> None:
    """Empty rows at the ends and between are cut like any other."""
    x = torch.zeros(9, 3)
    x[4, 1] = 2.0
    pieces = pieces_of(x.to_sparse(), 3)
    assert [piece.shape for piece in pieces] == [(3, 3)] * 3
    assert [piece._nnz() for piece in pieces] == [0, 1, 0]


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_a_sparse_leaf(rows: int, ub_size: int) -> None:
    """A sparse leaf gets its gradient."""
    x = _sparse(rows).requires_grad_()
    weight = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
    assert_exact(lambda x: (torch.sparse.mm(x, weight) ** 2).mean(), {"x": x}, [x, weight], ub_size)


def test_what_torch_has_no_derivative_for_is_refused() -> None:
    """A sparse tensor that requires grad and is not coalesced can't be cut; the error says what to do."""
    x = _sparse(6, coalesced=False).requires_grad_()
    with pytest.raises(BatchError, match=r"x \(.*Tensor\) is a sparse tensor that requires grad.*coalesce"):
        lay_out({"x": x})


def test_other_dim_is_refused() -> None:
    """Rows of a sparse tensor are along dim 0 only."""
    with pytest.raises(BatchError, match="whose rows are along dim 0"):
        lay_out({"x": _sparse(6)}, batch_dim=1)


def test_pieces_move_to_the_device_and_share_nothing_where_copies_are_asked_for() -> None:
    """A piece is moved; where it is to be a copy, it has values of its own."""
    x = _sparse(6)
    (piece,) = feed(lay_out({"x": x}), (6,), torch.device("meta"))
    assert piece.arguments["x"].device.type == "meta"
    (piece,) = feed(lay_out({"x": x}), (6,), None, copies=True)
    assert piece.arguments["x"].values().data_ptr() != x.values().data_ptr()


def test_sparse_outputs_are_joined() -> None:
    """A sparse output with the piece's rows comes back sparse, for the whole mini-batch."""
    x, weight = _sparse(10), nn.Parameter(torch.randn(6, 2, dtype=torch.float64))

    @anybatch.apply(["x"], ub_size=4)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sparse.mm(x, weight).pow(2).mean(), x * 2

    _, output = step(x)
    assert output.is_sparse
    assert torch.equal(output.to_dense(), x.to_dense() * 2)
