"""The autograd graph as data: what is read of it, in which order, and what that costs in nodes."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anybatch.exact import graph
from anybatch.exact.values import Recorder


def _leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_read_lists_children_before_parents() -> None:
    """Nodes come in postorder; an input that needs no gradient is the edge -1."""
    seen = graph.read([(_leaf(3) * 2).sum()])
    assert seen.names == [graph.LEAF, "MulBackward0", "SumBackward0"]
    assert seen.edges == [(), (0, -1), (1,)]
    assert seen.roots == (2,)


def test_read_visits_a_shared_node_once() -> None:
    """A node that two others use stands once, and has two edges leading to it."""
    shared = _leaf(3).exp()
    seen = graph.read([shared.sum() + shared.mean()])
    assert seen.names.count("ExpBackward0") == 1
    assert seen.parent_counts[seen.names.index("ExpBackward0")] == 2
    assert seen.parent_counts[seen.roots[0]] == 0


def test_read_of_two_losses_holds_both() -> None:
    """Two losses over one leaf are one graph with two roots."""
    leaf = _leaf(2)
    seen = graph.read([leaf.sum(), leaf.mean()])
    assert [seen.names[root] for root in seen.roots] == ["SumBackward0", "MeanBackward0"]
    assert seen.names.count(graph.LEAF) == 1


def test_read_of_a_leaf_is_the_leaf() -> None:
    """A loss that is itself a parameter has a graph of one node."""
    leaf = _leaf()
    seen = graph.read([leaf])
    assert seen.names == [graph.LEAF]
    assert seen.leaves()[0] is leaf


def test_read_of_a_deep_graph_does_not_recurse() -> None:
    """A graph deeper than Python's stack is read to its bottom."""
    value = leaf = _leaf()
    for _ in range(5000):
        value = value + 1
    seen = graph.read([value])
    assert len(seen.nodes) == 5001
    assert seen.leaves() == [leaf]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_structure_is_the_same_for_any_number_of_rows(rows: int) -> None:
    """Sizes are no part of the structure."""
    weight = _leaf(3)
    fewer, more = (torch.ones(n, 3, dtype=torch.float64) for n in (rows, rows + 1))
    structures = {graph.outline([(x * weight).tanh().mean()]).structure for x in (fewer, more)}
    assert len(structures) == 1


def test_structure_tells_operations_and_edges_apart() -> None:
    """Another operation, or the same ones wired in another way, is another structure."""
    a, b = _leaf(2), _leaf(2)
    losses = [(a.exp() - b).sum(), (a.exp() - b).mean(), (b - a.exp()).sum(), (a.exp() - a).sum()]
    assert len({graph.outline([loss]).structure for loss in losses}) == 4


def test_shapes_are_those_of_the_outputs() -> None:
    """A node tells the shape of what it gave forward, one per output."""
    leaf = _leaf(4, 3)
    assert graph.shapes(graph.node_of(leaf.mean(0))) == ((3,),)
    assert graph.shapes(graph.node_of(leaf.max(1).values)) == ((4,),)
    assert graph.shapes(graph.node_of(leaf.sum())) == ((),)


def test_lowest_precision_is_that_of_any_result_on_the_way() -> None:
    """One bfloat16 result inside a float64 loss is what the whole can be exact to."""
    exact = _leaf(3).sum()
    coarse = _leaf(3).to(torch.bfloat16).double().sum() + _leaf(3).float().sum()
    assert graph.lowest_precision(graph.read([exact]).nodes) == torch.float64
    assert graph.lowest_precision(graph.read([coarse]).nodes) == torch.bfloat16


def test_is_custom_only_of_python_functions() -> None:
    """A user's autograd Function is custom, what torch brings is not."""
    assert graph.is_custom(graph.node_of(_Double.apply(_leaf())))
    assert not graph.is_custom(graph.node_of(_leaf() * 2))


def test_has_reentrant_checkpoint_only_with_one() -> None:
    """Only the checkpoint that can't be differentiated through in parts is found."""
    leaf = _leaf(2)
    for is_reentrant in (True, False):
        value = checkpoint(torch.exp, leaf, use_reentrant=is_reentrant)
        assert graph.has_reentrant_checkpoint(graph.read([value.sum()])) is is_reentrant


def test_nearest_leaves_come_from_the_top() -> None:
    """Of three layers, the leaves of the last come first."""
    bottom, middle, top = _leaf(2), _leaf(2), _leaf(2)
    seen = graph.read([(((bottom.exp() * middle).exp()) * top).sum()])
    found = graph.nearest_leaves(seen, seen.roots, 2, lambda _: True)
    assert found[0] is top
    assert found[1] is middle


def test_nearest_leaves_pass_over_a_leaf_used_twice() -> None:
    """A tied weight may also lie at the bottom: another leaf is preferred, but it is better than none."""
    tied, single = _leaf(2), _leaf(2)
    seen = graph.read([(tied.exp() * single.exp().exp() * tied).sum()])
    assert graph.nearest_leaves(seen, seen.roots, 4, lambda _: True) == [single]
    found = graph.nearest_leaves(seen, seen.roots, 4, lambda leaf: leaf is tied)
    assert len(found) == 1
    assert found[0] is tied


def test_nearest_leaves_keep_to_the_accepted_ones() -> None:
    """A leaf that is not accepted does not count, even where there is no other."""
    seen = graph.read([_leaf(2).sum()])
    assert graph.nearest_leaves(seen, seen.roots, 4, lambda _: False) == []


def test_nearest_leaves_are_looked_for_below_each_place() -> None:
    """Two terms of a loss have a nearest leaf each."""
    near, far = _leaf(2), _leaf(2)
    seen = graph.read([near.sum() + far.exp().exp().exp().sum()])
    below = [place for place, name in enumerate(seen.names) if name == "SumBackward0"]
    assert graph.nearest_leaves(seen, seen.roots, 1, lambda _: True) == [near]
    assert {id(leaf) for leaf in graph.nearest_leaves(seen, below, 1, lambda _: True)} == {id(near), id(far)}


def test_reshape_has_one_name_inside_and_outside_of_a_dispatch_mode() -> None:
    """A run that is recorded has the graph of one that is not, also where something is reshaped."""
    rows = torch.randn(6, 4, requires_grad=True)

    def reshaped() -> Tensor:
        return rows.split(2, dim=1)[0].reshape(2, 3, 2).sum()

    with Recorder():
        recorded = graph.read([reshaped()])
    assert recorded.is_like(graph.read([reshaped()]))
