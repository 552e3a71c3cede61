"""Entries that require grad get the gradient that the whole mini-batch would have given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.batch import InputGradient, InputLeaf, balanced, feed, input_gradients, lay_out

ROWS = 10
SIZES = balanced(ROWS, 4)


def _in_pieces(
    function: Callable[..., Tensor], arguments: dict[str, Any], batch_dim: Any = 0
) -> list[tuple[Tensor, Tensor]]:
    """Run backward piece by piece on a sum over rows, and put the gradients of the inputs together."""
    collected: list[InputGradient] = []
    for piece in feed(lay_out(arguments, batch_dim), SIZES, None):
        loss = function(**piece.arguments)
        if loss.requires_grad:
            loss.backward()
        collected += [leaf.gradient() for leaf in piece.inputs]
    return input_gradients(collected)


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _whole(
    function: Callable[..., Tensor], arguments: dict[str, Any], *sources: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(**arguments), sources)


def _assert_gradients(found: list[tuple[Tensor, Tensor]], expected: dict[int, Tensor]) -> None:
    assert sorted(id(source) for source, _ in found) == sorted(expected)
    for source, grad in found:
        torch.testing.assert_close(grad, expected[id(source)], rtol=1e-12, atol=1e-12)
        assert (grad.shape, grad.dtype, grad.requires_grad) == (source.shape, source.dtype, False)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_get_their_gradient(dim: int) -> None:
    """The pieces' gradients of an entry with rows line up in row order, at any batch dim."""
    x = _rows(*((ROWS, 3) if dim == 0 else (3, ROWS)))

    def loss(x: Tensor) -> Tensor:
        return (x.sin() * x).sum()

    (expected,) = _whole(loss, {"x": x}, x)
    _assert_gradients(_in_pieces(loss, {"x": x}, dim), {id(x): expected})
    assert x.grad is None


def test_shared_entry_gets_the_sum() -> None:
    """An entry that all rows share gets what every piece gives it."""
    x, table, scale = _rows(ROWS, 3), _rows(4, 3), _rows()

    def loss(x: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        return (torch.cdist(x, table).square() * scale).sum()

    arguments = {"x": x, "table": table, "scale": scale}
    expected = _whole(loss, arguments, x, table, scale)
    found = _in_pieces(loss, arguments, {"table": None})
    _assert_gradients(found, dict(zip(map(id, (x, table, scale)), expected, strict=True)))


def test_tensors_inside_of_rows_get_their_gradient() -> None:
    """A tensor that belongs to one row is in one piece, and gets that piece's gradient."""
    rows = [_rows(i + 1) for i in range(ROWS)]

    def loss(rows: list[Tensor]) -> Tensor:
        return torch.stack([row.square().sum() for row in rows]).sum()

    expected = _whole(loss, {"rows": rows}, *rows)
    _assert_gradients(_in_pieces(loss, {"rows": rows}), dict(zip(map(id, rows), expected, strict=True)))


def test_source_under_two_names_counts_for_each() -> None:
    """A tensor entered twice, once by rows and once whole, gets the sum over its entries, once."""
    x = _rows(ROWS, 3)

    def loss(x: Tensor, again: Tensor, table: Tensor) -> Tensor:
        return (x.sin() * again.cos()).sum() + torch.cdist(x, table).sum()

    arguments = {"x": x, "again": x, "table": x}
    (expected,) = _whole(loss, arguments, x)
    _assert_gradients(_in_pieces(loss, arguments, {"table": None}), {id(x): expected})


def test_graph_above_is_traversed_once() -> None:
    """The encoder that made an entry runs backward once for all pieces, with the whole gradient."""
    weight, calls = _rows(3, 3), []
    x = (torch.randn(ROWS, 3, dtype=torch.float64) @ weight).tanh()
    x.grad_fn.register_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]

    def loss(x: Tensor) -> Tensor:
        return x.square().sum()

    (expected,) = torch.autograd.grad(loss(x), weight, retain_graph=True)
    calls.clear()
    ((source, grad),) = _in_pieces(loss, {"x": x})
    assert calls == []
    source.backward(grad)
    assert calls == [1]
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_leaf_stands_for_the_callers_tensor() -> None:
    """Every piece of an entry that requires grad is a leaf of its own that says whose rows it holds."""
    x = _rows(ROWS, 2)
    pieces = list(feed(lay_out({"batch": {"x": x, "y": torch.ones(ROWS)}}), SIZES, None))
    for piece in pieces:
        (leaf,) = piece.inputs
        assert isinstance(leaf, InputLeaf)
        assert leaf.leaf is piece.arguments["batch"]["x"]
        assert (leaf.leaf.is_leaf, leaf.leaf.requires_grad) == (True, True)
        assert (leaf.source is x, leaf.dim, leaf.start) == (True, 0, piece.start)
        assert torch.equal(leaf.leaf.detach(), x.detach()[piece.start : piece.start + piece.rows])
    assert not pieces[0].arguments["batch"]["y"].requires_grad


def test_leaf_of_a_shared_entry_begins_at_the_first_row() -> None:
    """An entry that each piece gets whole has neither a dim nor a start of its own."""
    layout = lay_out({"x": torch.ones(ROWS), "table": _rows(4)}, batch_dim={"table": None})
    assert [(p.inputs[0].dim, p.inputs[0].start) for p in feed(layout, SIZES, None)] == [(None, 0)] * 3


def test_leaves_are_made_with_gradients_disabled_too() -> None:
    """A function that differentiates by its inputs works in evaluation as well."""
    x = _rows(ROWS)
    with torch.no_grad():
        piece = next(feed(lay_out({"x": x}), SIZES, None))
    assert piece.arguments["x"].requires_grad
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(piece.arguments["x"].square().sum(), piece.arguments["x"])
    torch.testing.assert_close(slope, 2 * x.detach()[:4])


def test_piece_without_gradient_gives_zeros() -> None:
    """Rows whose loss does not depend on them get zeros, as in the whole mini-batch."""
    x, y = _rows(ROWS), _rows(ROWS)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return y.sum() if x[0] == first else (x + y).sum()

    first = x.detach()[4]
    found = _in_pieces(loss, {"x": x, "y": y})
    expected = torch.ones(ROWS, dtype=torch.float64)
    expected[4:7] = 0
    _assert_gradients(found, {id(x): expected, id(y): torch.ones(ROWS, dtype=torch.float64)})


def test_source_without_any_gradient_is_left_out() -> None:
    """An input that the loss never touches has no gradient, like in plain PyTorch."""
    x, unused = _rows(ROWS), _rows(ROWS)
    found = _in_pieces(lambda x, unused: x.sum(), {"x": x, "unused": unused})
    assert [source is x for source, _ in found] == [True]
    assert input_gradients([]) == []


def test_gradient_goes_back_to_the_sources_device() -> None:
    """What is kept of a piece lives where the caller's tensor does."""
    source = torch.ones(3, requires_grad=True)
    leaf = torch.ones(3, dtype=torch.float32, requires_grad=True)
    leaf.grad = torch.full((3,), 2.0)
    record = InputLeaf(source, leaf, dim=0, start=0).gradient()
    assert record.grad is not None
    assert record.grad.device == source.device
    assert record.grad.tolist() == [2, 2, 2]
    moved = InputLeaf(torch.ones(3, device="meta", requires_grad=True), leaf, dim=0, start=0).gradient()
    assert moved.grad is not None
    assert moved.grad.device.type == "meta"


def test_collected_gradients_stay_as_they_were() -> None:
    """Putting gradients together does not write into those that were collected."""
    source, grad = torch.zeros(4, requires_grad=True), torch.ones(2)
    records = [
        InputGradient(source, grad, 0, 0),
        InputGradient(source, grad, 0, 2),
        InputGradient(source, None, 0, 0),
    ]
    ((_, total),) = input_gradients(records)
    assert total.tolist() == [1, 1, 1, 1]
    total += 1
    assert grad.tolist() == [1, 1]
