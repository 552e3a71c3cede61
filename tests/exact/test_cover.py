"""Leaves that see all of a backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anybatch.exact import graph
from anybatch.exact.cover import covering_leaves


def _cover(loss: Tensor, refused: Tensor | None = None) -> set[int]:
    return {id(leaf) for leaf in covering_leaves(graph.read([loss]), lambda leaf: leaf is not refused)}


def test_deepest_weight_sees_a_chain() -> None:
    """Of a chain of layers the weight of the first alone is needed: its bias tells no rows apart."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    assert _cover(net(torch.randn(6, 3)).mean()) == {id(net[0].weight)}


def test_each_branch_has_a_leaf_of_its_own() -> None:
    """What happens on the way down one branch does not show below the other."""
    one, two, head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)
    x = torch.randn(6, 3)
    assert _cover(head(one(x) + two(x).tanh()).mean()) == {id(one.weight), id(two.weight)}


def test_small_weights_are_preferred() -> None:
    """A product of parameters is seen by the smaller of its operands."""
    large, small = torch.randn(8, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    assert _cover((torch.randn(6, 8) @ (large @ small)).square().mean()) == {id(small)}


def test_leaf_that_is_not_accepted_is_replaced_by_another() -> None:
    """Where the first choice is no lasting leaf, another one below the same operation is taken."""
    layer = nn.Linear(3, 4)
    assert _cover(layer(torch.randn(6, 3)).mean(), layer.weight) == {id(layer.bias)}


def test_custom_function_has_a_leaf_below_each_input() -> None:
    """Its backward may treat its inputs unlike each other."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
            return rows * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, gradient.sum(0)

    layer, weight = nn.Linear(3, 4), torch.randn(4, requires_grad=True)
    loss = Product.apply(layer(torch.randn(6, 3)), weight).mean()
    assert _cover(loss) == {id(layer.weight), id(weight)}
