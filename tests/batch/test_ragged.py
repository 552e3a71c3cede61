"""Jagged nested tensors are cut by row, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.batch import feed, join, lay_out

from .exactness import CUTS, assert_exact, pieces_of


def _lengths(rows: int) -> list[int]:
    return [(3 * row) % 5 + 1 for row in range(rows)]


def _jagged(rows: int, width: int = 3) -> Tensor:
    parts = [torch.randn(length, width, dtype=torch.float64) for length in _lengths(rows)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("reduction", ["tokens", "rows", "sum"])
def test_jagged_batch_equals_the_whole(rows: int, ub_size: int, reduction: str) -> None:
    """Means over tokens, means over rows and sums of a jagged batch have the gradient of the whole."""
    network = _network()

    def step(x: Tensor, y: Tensor) -> Tensor:
        if reduction == "rows":
            return ((network(x).to_padded_tensor(0.0).sum(dim=(1, 2)) - y) ** 2).mean()
        squares = network(x).values() ** 2
        return squares.mean() if reduction == "tokens" else squares.sum() + (y**2).sum()

    assert_exact(step, {"x": _jagged(rows), "y": torch.randn(rows).double()}, network, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_the_values_of_a_jagged_batch(rows: int, ub_size: int) -> None:
    """A jagged batch made from values that require grad sends each row's gradient to its values."""
    values = torch.randn(sum(_lengths(rows)), 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, *_lengths(rows)]).cumsum(0)
    network = _network()

    def step(x: Tensor) -> Tensor:
        return network(x).values().pow(2).mean()

    batch = {"x": torch.nested.nested_tensor_from_jagged(values * 2, offsets)}
    expected = torch.autograd.grad(step(**batch), [values, *network.parameters()])
    batch = {"x": torch.nested.nested_tensor_from_jagged(values * 2, offsets)}
    anybatch.apply(["x"], ub_size=ub_size)(step)(**batch)
    for leaf, gradient in zip([values, *network.parameters()], expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_gradient_reaches_a_jagged_leaf(rows: int, ub_size: int) -> None:
    """A jagged tensor that is a leaf itself gets its gradient, jagged like itself."""
    x, network = _jagged(rows).requires_grad_(), _network()
    assert_exact(lambda x: network(x).values().pow(2).mean(), {"x": x}, [x, *network.parameters()], ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("kind", ["plain", "with holes", "ragged last"])
def test_rows_stay_in_order(rows: int, ub_size: int, kind: str) -> None:
    """Every row comes once and in order, as it was, also where there are holes or the last dim is ragged."""
    x = _jagged(rows)
    if kind == "with holes":
        starts, lengths = torch.arange(rows) % 2, torch.tensor(_lengths(rows))
        dense = torch.randn(rows, 7, 3, dtype=torch.float64)
        x = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    if kind == "ragged last":
        x = x.transpose(1, 2)
    pieces = pieces_of(x, ub_size)
    found = [row for piece in pieces for row in piece.unbind()]
    assert len(found) == rows
    assert all(torch.equal(a, b) for a, b in zip(found, x.unbind(), strict=True))
    joined = join(pieces, [piece.shape[0] for piece in pieces], None)
    assert joined.layout is torch.jagged
    assert all(torch.equal(a, b) for a, b in zip(joined.unbind(), x.unbind(), strict=True))


def test_pieces_are_views_unless_copies_are_asked_for() -> None:
    """A piece has no values of its own, except where it must not share them."""
    x = _jagged(6)
    layout = lay_out({"x": x})
    for copies in (False, True):
        for piece in feed(layout, (3, 3), None, copies=copies):
            begin, end = (x.values().data_ptr(), x.values().data_ptr() + x.values().nbytes)
            is_inside = begin <= piece.arguments["x"].values().data_ptr() < end
            assert is_inside is not copies


def test_pieces_move_to_the_device() -> None:
    """Values and offsets of a piece are moved."""
    (piece,) = feed(lay_out({"x": _jagged(4)}), (4,), torch.device("meta"))
    assert piece.arguments["x"].values().device.type == "meta"


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_jagged_outputs_are_joined(rows: int, ub_size: int) -> None:
    """A jagged output with the piece's rows comes back jagged, for the whole mini-batch."""
    x, network = _jagged(rows), _network()

    @anybatch.apply(["x"], ub_size=ub_size)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        output = network(x)
        return output.values().pow(2).mean(), output

    _, output = step(x=x)
    assert not output.requires_grad
    torch.testing.assert_close(output.values(), network(x).values().detach())
    assert output.offsets().tolist() == x.offsets().tolist()


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_gradients_disabled(disabled: Callable[[], AbstractContextManager[None]]) -> None:
    """A jagged batch is evaluated in pieces too, and jagged outputs are joined."""
    x, network = _jagged(10), _network()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        output = network(x)
        return output.values().pow(2).mean(), output

    expected, _ = step(x)
    with disabled():
        loss, output = anybatch.apply(["x"], ub_size=4)(step)(x=x)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(output.values(), network(x).values().detach())


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_piece_is_padded_to_its_longest_row(rows: int, ub_size: int) -> None:
    """A piece knows how long its longest row is, so that it is not padded to more; so does what is joined."""
    x = _jagged(rows)
    pieces = pieces_of(x, ub_size)
    joined = join(pieces, [len(piece.offsets()) - 1 for piece in pieces], None)
    for value in (*pieces, joined):
        longest = max(len(row) for row in value.unbind())
        assert value.to_padded_tensor(0.0).shape[1] == longest
