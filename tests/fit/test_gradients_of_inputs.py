"""Batch entries that require grad get the whole gradient; the graph above them is traversed once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactWarning

from .whole import UB_SIZE, assert_same_gradients, batch, clear, gradients, net


def loss_of(model: nn.Module, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(h), y)


@pytest.fixture
def parts() -> tuple[nn.Module, nn.Module]:
    """An encoder that runs before the call, and a model that runs in it."""
    torch.manual_seed(2)
    return nn.Linear(3, 3).double(), net()


@pytest.mark.parametrize("ignores", [False, True])
def test_leaf_input(ignores: bool) -> None:
    """A leaf in the mini-batch gets its gradient, added to what it had."""
    model, rows = net(), batch(ignores=ignores)
    leaf = rows["x"].requires_grad_()
    leaves = [leaf, *model.parameters()]
    loss_of(model, leaf, rows["y"]).backward()
    expected = gradients(leaves)
    clear(leaves)
    leaf.grad = torch.ones_like(leaf)
    anybatch.apply(["h", "y"], UB_SIZE)(loss_of)(model, h=leaf, y=rows["y"])
    expected[0] = expected[0] + 1
    assert_same_gradients(expected, gradients(leaves))


@pytest.mark.parametrize("ignores", [False, True])
def test_graph_above_is_traversed_once(parts: tuple[nn.Module, nn.Module], ignores: bool) -> None:
    """The encoder above gets its gradient from one backward, with the gradient of all rows."""
    encoder, model = parts
    rows = batch(ignores=ignores)
    leaves = [*encoder.parameters(), *model.parameters()]
    h = encoder(rows["x"])
    h.retain_grad()
    loss_of(model, h, rows["y"]).backward()
    expected, expected_above = gradients(leaves), h.grad
    clear(leaves)
    h, seen = encoder(rows["x"]), []
    h.register_hook(lambda gradient: seen.append(gradient.clone()))
    anybatch.apply(["h", "y"], UB_SIZE)(loss_of)(model, h=h, y=rows["y"])
    assert_same_gradients([expected_above], seen)
    assert_same_gradients(expected, gradients(leaves))


def test_nonlinear_hook_above(parts: tuple[nn.Module, nn.Module]) -> None:
    """A hook above the call sees the finished gradient, so that a clamp there gives what it gives whole."""
    encoder, model = parts
    rows, leaves = batch(), [*encoder.parameters(), *model.parameters()]

    def encoded() -> Tensor:
        h = encoder(rows["x"])
        h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return h

    loss_of(model, encoded(), rows["y"]).backward()
    expected = gradients(leaves)
    clear(leaves)
    anybatch.apply(["h", "y"], UB_SIZE)(loss_of)(model, h=encoded(), y=rows["y"])
    assert_same_gradients(expected, gradients(leaves))


def test_encoder_that_is_used_in_the_call_too(parts: tuple[nn.Module, nn.Module]) -> None:
    """Parameters that are used above the call and in it get both gradients."""
    encoder, model = parts
    rows, leaves = batch(), [*encoder.parameters(), *model.parameters()]

    def function(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(encoder(h)), y)

    function(encoder(rows["x"]), rows["y"]).backward()
    expected = gradients(leaves)
    clear(leaves)
    anybatch.apply(["h", "y"], UB_SIZE)(function)(h=encoder(rows["x"]), y=rows["y"])
    assert_same_gradients(expected, gradients(leaves))


def test_entry_under_two_names() -> None:
    """A tensor that is passed twice gets the sum over both places."""
    model, rows = net(), batch()
    leaf = rows["x"].requires_grad_()

    def function(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(a) * model(b.tanh()), y)

    function(leaf, leaf, rows["y"]).backward()
    expected = gradients([leaf])
    leaf.grad = None
    anybatch.apply(["a", "b", "y"], UB_SIZE)(function)(a=leaf, b=leaf, y=rows["y"])
    assert_same_gradients(expected, gradients([leaf]))


def test_rows_that_a_piece_does_not_use() -> None:
    """Rows of a piece whose loss does not depend on them get zeros."""
    model, rows = net(), batch(ignores=False)
    leaf = torch.randn(10, 2, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, extra: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return F.cross_entropy(outputs + extra if bool((y == 0).all()) else outputs, y)

    y = torch.tensor([0] * 4 + [1] * 6)
    call = anybatch.apply(["x", "extra", "y"], UB_SIZE)(function)
    call(x=rows["x"], extra=leaf, y=y)
    sizes = (4, 3, 3)
    expected = torch.zeros_like(leaf)
    first = leaf.detach()[:4].clone().requires_grad_()
    (F.cross_entropy(model(rows["x"][:4]) + first, y[:4]) * sizes[0] / 10).backward()
    expected[:4] = first.grad
    assert_same_gradients([expected], gradients([leaf]))


def test_shared_entry_that_requires_grad() -> None:
    """A table that all rows share gets the sum over the pieces."""
    model, rows = net(), batch()
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def function(table: Tensor, token: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(table[token]), y)

    token = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 1, 4])
    function(table, token, rows["y"]).backward()
    expected = gradients([table])
    table.grad = None
    options = {"batch_dim": {"table": None}}
    anybatch.apply(["table", "token", "y"], UB_SIZE, **options)(function)(
        table=table, token=token, y=rows["y"]
    )
    assert_same_gradients(expected, gradients([table]))


def test_list_elements_that_require_grad() -> None:
    """Elements of a list with one tensor per row get their own gradients."""
    model, rows = net(), batch()
    elements = [row.clone().requires_grad_() for row in rows["x"]]

    def function(rows: list[Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(model(torch.stack(rows)), y)

    function(elements, rows["y"]).backward()
    expected = gradients(elements)
    clear(elements)
    with pytest.warns(InexactWarning, match="another graph for another number of rows"):
        anybatch.apply(["rows", "y"], UB_SIZE)(function)(rows=elements, y=rows["y"])
    assert_same_gradients(expected, gradients(elements))


def test_evaluation_leaves_the_graph_above(parts: tuple[nn.Module, nn.Module]) -> None:
    """With gradients disabled nothing is sent up, and the graph can be used afterwards."""
    encoder, model = parts
    rows = batch()
    h = encoder(rows["x"])
    with torch.no_grad():
        anybatch.apply(["h", "y"], UB_SIZE)(loss_of)(model, h=h, y=rows["y"])
    assert [leaf.grad for leaf in encoder.parameters()] == [None, None]
    h.sum().backward()
    assert encoder.bias.grad is not None
