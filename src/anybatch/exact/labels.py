"""Where the rows are: each node of a loss's graph labelled by comparing two runs at different row counts.

A node whose output changes its shape with the rows still has them (ROWS). A node above such a one whose
output does not has summed them up, or picked from them (COLLAPSED). What has only parameters below is
the same for every micro-batch (PARAMETERS).
"""

import enum
from dataclasses import dataclass

from anybatch.exact.graph import Graph, is_custom, shapes

# What these give depends on values, so two runs may agree in shape by accident although rows are there.
_SELECTIONS = {
    *("IndexBackward0", "MaskedSelectBackward0", "GatherBackward0", "IndexSelectBackward0"),
    *("TakeBackward0", "RepeatInterleaveBackward0", "TakeAlongDimBackward0"),
}

_REDUCTIONS = {"SumBackward0", "MeanBackward0", "SumBackward1", "MeanBackward1"}


class Label(enum.Enum):
    ROWS = "rows"
    COLLAPSED = "collapsed"
    PARAMETERS = "parameters"


@dataclass(frozen=True, eq=False)
class Labelled:
    """A graph with a label for each of its nodes, and how often each grows with the rows.

    Attributes:
        graph: The graph of the larger run.
        labels: One per node.
        couplings: What the shapes alone show to mix rows, one sentence each.
    """

    graph: Graph
    labels: list[Label]
    couplings: tuple[str, ...]


def label(large: Graph, large_rows: int, small: Graph, small_rows: int) -> Labelled | None:
    """Labels the graph of the larger run, or returns None where the two runs are not alike."""
    if large.structure != small.structure or large.roots != small.roots:
        return None
    large_shapes = [shapes(node) for node in large.nodes]
    small_shapes = [shapes(node) for node in small.nodes]
    labels: list[Label] = []
    selected: set[int] = set()
    for place, edges in enumerate(large.edges):
        children = [labels[child] for child in edges if child >= 0]
        shape = large_shapes[place]
        has_rows_below = is_custom(large.nodes[place]) or any(kid is not Label.PARAMETERS for kid in children)
        is_selected = has_rows_below and _stays_selected(large, place, labels, selected, shape)
        if is_selected or shape != small_shapes[place]:
            labels.append(Label.ROWS)
        else:
            labels.append(Label.COLLAPSED if has_rows_below else Label.PARAMETERS)
    ratio = large_rows / small_rows
    couplings = [
        *_grow_twice(large, large_shapes, small_shapes, ratio),
        *_come_back(large, labels),
    ]
    return Labelled(large, labels, tuple(dict.fromkeys(couplings)))


def _stays_selected(
    graph: Graph,
    place: int,
    labels: list[Label],
    selected: set[int],
    shape: tuple[tuple[int, ...], ...],
) -> bool:
    """Is the node a data-dependent selection of rows, or above one with no reduction over rows between?"""
    name, edges = graph.names[place], graph.edges[place]
    starts = name in _SELECTIONS and any(child >= 0 and labels[child] is Label.ROWS for child in edges)
    goes_on = any(child in selected for child in edges) and not _reduces_rows(graph, place)
    if (starts or goes_on) and any(shape):
        selected.add(place)
        return True
    return False


def _reduces_rows(graph: Graph, place: int) -> bool:
    if graph.names[place] not in _REDUCTIONS:
        return False
    dims = getattr(graph.nodes[place], "_saved_dim", None)
    return dims is None or 0 in dims


def _grow_twice(
    graph: Graph,
    large: list[tuple[tuple[int, ...], ...]],
    small: list[tuple[tuple[int, ...], ...]],
    ratio: float,
) -> list[str]:
    """Nodes with two dims proportional to rows: every row meets every row (pairwise losses)."""
    found = []
    for place, (large_outputs, small_outputs) in enumerate(zip(large, small, strict=True)):
        for big, little in zip(large_outputs, small_outputs, strict=False):
            growth = [b / s for b, s in zip(big, little, strict=False) if s and b != s]
            if len(big) == len(little) and sum(abs(factor - ratio) < 1e-9 for factor in growth) >= 2:
                found.append(f"{pretty(graph.names[place])} gives one value per pair of rows, shape {big}")
    return found[:1]


def _come_back(graph: Graph, labels: list[Label]) -> list[str]:
    """Nodes with rows that take in a value of the whole piece, such as the mean over the batch."""
    found = []
    for place, edges in enumerate(graph.edges):
        if labels[place] is not Label.ROWS:
            continue
        for child in edges:
            if child >= 0 and labels[child] is Label.COLLAPSED:
                found.append(
                    f"{pretty(graph.names[place])} brings {pretty(graph.names[child])}, "
                    "a value over all rows of the piece, back to each row"
                )
    return found[:1]


def pretty(name: str) -> str:
    """The operation's name as users know it: `MseLossBackward0` -> `MseLoss`."""
    return name.removeprefix("torch::autograd::").rstrip("0123456789").removesuffix("Backward")
