"""The autograd graph as plain data: its nodes, its edges and who is below whom.

A graph is read once and labelled by comparing it with the graph of the same function at another number
of rows (`labels.py`). Node objects are kept, for Python wrappers are only identical while one is alive.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.autograd.graph import Node

Shapes = tuple[tuple[int, ...], ...]
"""The shape of each output of a node."""

LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, eq=False)
class Graph:
    """Every node below some roots, children before parents.

    Attributes:
        nodes: The nodes in depth-first postorder.
        edges: For each node the positions of its children in `nodes`; -1 where an input needs no gradient.
        roots: The positions of the roots.
    """

    nodes: list[Node]
    edges: list[tuple[int, ...]]
    roots: tuple[int, ...]

    @cached_property
    def names(self) -> list[str]:
        """The name of each node."""
        return [name_of(node) for node in self.nodes]

    def is_like(self, other: "Graph") -> bool:
        """Are they the graphs of two runs of the same operations, whatever the sizes?"""
        return self.edges == other.edges and self.names == other.names and self.roots == other.roots

    @cached_property
    def parent_counts(self) -> list[int]:
        """For each node how many edges lead to it."""
        counts = [0] * len(self.nodes)
        for edges in self.edges:
            for child in edges:
                if child >= 0:
                    counts[child] += 1
        return counts

    def leaves(self) -> list[torch.Tensor]:
        """The tensors into which backward through this graph accumulates."""
        return [leaf_of(node) for node, name in zip(self.nodes, self.names, strict=True) if name == LEAF]


def name_of(node: Node) -> str:
    """The name of a node as torch spells it, but one for the two that a reshape may have.

    Which one depends on whether a dispatch mode is entered, as it is where values are recorded (torch 2.13).
    """
    name: str = node.name()
    return "ViewBackward0" if name == "ReshapeAliasBackward0" else name


def leaf_of(node: Node) -> torch.Tensor:
    """The leaf tensor of an AccumulateGrad node."""
    variable: torch.Tensor = node.variable  # type: ignore[attr-defined]  # only AccumulateGrad has it
    return variable


def read(roots: Sequence[torch.Tensor]) -> Graph:
    """Reads the graph below the given tensors, which all require grad.

    Costs about a microsecond per node; nothing of a node but its name and children is touched.
    """
    places: dict[Node, int] = {}
    nodes: list[Node] = []
    edges: list[tuple[int, ...]] = []
    tops = [node_of(root) for root in roots]
    for top in tops:
        _visit(top, places, nodes, edges)
    return Graph(nodes, edges, tuple(places[top] for top in tops))


@dataclass(frozen=True, eq=False)
class Outline:
    """What a graph is looked through for in every call.

    Attributes:
        structure: A hash of names and edges: equal for two runs of the same operations, whatever the sizes.
        leaves: The tensors into which backward through the graph accumulates.
    """

    structure: int
    leaves: tuple[torch.Tensor, ...]


def outline(roots: Sequence[torch.Tensor]) -> Outline:
    """Looks through the graph below tensors that require grad, in a third of the time of `read`."""
    # The nodes in depth-first preorder, written down with the places of those that were met before: nothing
    # else has the same record.
    places: dict[Node, int] = {}
    record: list[object] = [len(roots)]
    leaves: list[torch.Tensor] = []
    stack: list[Node | None] = [node_of(root) for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in places:
            record.append(None if node is None else places[node])
            continue
        places[node] = len(places)
        name, below = name_of(node), node.next_functions
        record += (name, len(below))
        if name == LEAF:
            leaves.append(leaf_of(node))
        for child, _ in below:
            stack.append(child)
    return Outline(hash(tuple(record)), tuple(leaves))


def node_of(tensor: torch.Tensor) -> Node:
    """The node of a tensor that requires grad: its grad_fn, or its accumulator if it is a leaf."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


_OPENED = -1
"""Stands for the place of a node whose children are not all placed yet."""


def _visit(top: Node, places: dict[Node, int], nodes: list[Node], edges: list[tuple[int, ...]]) -> None:
    stack: list[tuple[Node, list[Node | None] | None]] = [(top, None)]
    while stack:
        node, children = stack.pop()
        if children is not None:
            places[node] = len(nodes)
            nodes.append(node)
            edges.append(tuple([-1 if child is None else places[child] for child in children]))
        elif node not in places:
            places[node] = _OPENED
            children = [child for child, _ in node.next_functions]
            stack.append((node, children))
            for child in reversed(children):
                if child is not None and child not in places:
                    stack.append((child, None))


def shapes(node: Node) -> Shapes:
    """The shapes of the node's forward outputs; -1 is the ragged dim of a nested tensor."""
    return tuple(
        tuple([dim if type(dim) is int else -1 for dim in meta.shape]) for meta in node._input_metadata
    )


def lowest_precision(nodes: Iterable[Node]) -> torch.dtype:
    """The dtype with the fewest digits that the graph's forward outputs have; float64 if there is none."""
    dtypes = {meta.dtype for node in nodes for meta in node._input_metadata}
    floating = [
        dtype for dtype in dtypes if dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    ]
    return max(floating, key=_eps, default=torch.float64)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def is_custom(node: Node) -> bool:
    """Is the node a Python autograd Function, a compiled region among them?"""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_compiled(tensors: Iterable[torch.Tensor]) -> bool:
    """Is any of the tensors what a compiled region gave?"""
    # torch.compile takes seconds to import; what was never imported has compiled nothing.
    is_loaded = "torch._dynamo" in sys.modules
    return is_loaded and any(node_of(tensor).name().startswith("CompiledFunction") for tensor in tensors)


def has_reentrant_checkpoint(graph: Graph) -> bool:
    """Does it hold a checkpoint that can only be run backward as a whole?"""
    return "CheckpointFunctionBackward" in graph.names


def nearest_leaves(
    graph: Graph, places: Iterable[int], count: int, accept: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    """Below each of some nodes the leaves fewest edges away that only one edge leads to.

    A gradient with respect to these costs a walk through the tail of the graph alone. A leaf that is
    used twice (tied weights) is passed over where there is another: its second use may lie at the bottom.
    """
    found = {id(leaf): leaf for place in places for leaf in _nearest(graph, place, count, accept)}
    return list(found.values())


def _nearest(
    graph: Graph, top: int, count: int, accept: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    order, seen = [top], {top}
    single: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    for place in order:
        if graph.names[place] == LEAF and accept(leaf_of(graph.nodes[place])):
            (single if graph.parent_counts[place] == 1 else shared).append(leaf_of(graph.nodes[place]))
            if len(single) == count:
                break
        for child in graph.edges[place]:
            if child >= 0 and child not in seen:
                seen.add(child)
                order.append(child)
    return single or shared[:1]
