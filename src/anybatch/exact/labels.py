"""Where the rows are: each node of a loss's graph labelled by comparing two runs at different row counts.

A node whose output changes its shape with the rows still has them (ROWS). A node above such a one whose
output does not has summed them up, or picked from them (COLLAPSED). What has only parameters below is
the same for every micro-batch (PARAMETERS).
"""

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from anybatch.exact.graph import Graph, Shapes, is_custom, shapes
from anybatch.exact.replicas import without_replicas

# What these give depends on values, so two runs may agree in shape by accident although rows are there.
_SELECTIONS = {
    *("IndexBackward0", "MaskedSelectBackward0", "GatherBackward0", "IndexSelectBackward0"),
    *("TakeBackward0", "RepeatInterleaveBackward0", "TakeAlongDimBackward0"),
    "SliceBackward0",  # of a packed sequence: as many rows as go on to the next step
}

_REDUCTIONS = {"SumBackward0", "MeanBackward0", "SumBackward1", "MeanBackward1"}


class Label(enum.Enum):
    """Where the rows are, as seen from one node."""

    ROWS = "rows"
    COLLAPSED = "collapsed"
    PARAMETERS = "parameters"


@dataclass(frozen=True, eq=False)
class Labelled:
    """A graph with a label for each of its nodes.

    Attributes:
        graph: The graph of the larger run.
        labels: One per node.
        couplings: What the shapes alone show to mix rows, one sentence each.
    """

    graph: Graph
    labels: list[Label]
    couplings: tuple[str, ...]


def label(large: Graph, large_rows: int, small: Graph, small_rows: int) -> Labelled | None:
    """Labels the graph of the larger run.

    Args:
        large: The graph of the run with more rows.
        large_rows: Its number of rows.
        small: The graph of the same function on fewer rows.
        small_rows: Their number.

    Returns:
        The larger graph with its labels; None where the two runs are not alike.
    """
    if not large.is_like(small):
        large, small = without_replicas(large), without_replicas(small)
    if not large.is_like(small):
        return None
    large_shapes = [shapes(node) for node in large.nodes]
    small_shapes = [shapes(node) for node in small.nodes]
    labels: list[Label] = []
    selected: set[int] = set()
    for place, shape in enumerate(large_shapes):
        if any(shape) and _is_selected(large, place, labels, selected):
            selected.add(place)
        has_rows = place in selected or shape != small_shapes[place]
        labels.append(Label.ROWS if has_rows else label_without_rows(large, place, labels))
    couplings = [
        *_grow_twice(large, large_shapes, small_shapes, large_rows / small_rows),
        *_come_back(large, labels),
        *_scaled_by_frequency(large),
    ]
    return Labelled(large, labels, tuple(dict.fromkeys(couplings)))


def label_without_rows(graph: Graph, place: int, labels: Sequence[Label]) -> Label:
    """The label of a node whose output has no rows, from those of the nodes below it."""
    below = {labels[child] for child in graph.edges[place] if child >= 0}
    has_rows_below = _may_hold_data(graph, place) or below - {Label.PARAMETERS}
    return Label.COLLAPSED if has_rows_below else Label.PARAMETERS


def _may_hold_data(graph: Graph, place: int) -> bool:
    """Is it a custom node that may have taken in data that the graph does not show?

    Not where all its tensors need gradients and it gives no single value, as rounding of weights does; nor in
    `nn.DataParallel`'s copies of parameters. Compiled regions and checkpoints run code of any kind.
    """
    node, name = graph.nodes[place], graph.names[place]
    if not is_custom(node) or name == "BroadcastBackward":
        return False
    runs_any_code = name.startswith(("CompiledFunction", "CheckpointFunction"))
    return runs_any_code or min(graph.edges[place], default=-1) < 0 or () in shapes(node)


def _is_selected(graph: Graph, place: int, labels: Sequence[Label], selected: Collection[int]) -> bool:
    """Is the node a data-dependent selection of rows, or above one with no reduction over rows between?"""
    children = [child for child in graph.edges[place] if child >= 0]
    if graph.names[place] in _SELECTIONS and any(labels[child] is Label.ROWS for child in children):
        return True
    return any(child in selected for child in children) and not _reduces_rows(graph, place)


def _reduces_rows(graph: Graph, place: int) -> bool:
    if graph.names[place] not in _REDUCTIONS:
        return False
    dims = getattr(graph.nodes[place], "_saved_dim", None)
    return dims is None or 0 in dims


def _grow_twice(
    graph: Graph, large: Sequence[Shapes], small: Sequence[Shapes], ratio: float
) -> Iterator[str]:
    """The first node with two dims proportional to rows, made of one: every row meets every row.

    Rows that come padded have two such dims by chance, where their longest grows like their number.
    """
    growing: list[int] = []
    for place, (large_outputs, small_outputs) in enumerate(zip(large, small, strict=True)):
        outputs = zip(large_outputs, small_outputs, strict=False)
        growing.append(max((_dims_that_grow(big, little, ratio) for big, little in outputs), default=0))
        below = max((growing[child] for child in graph.edges[place] if child >= 0), default=0)
        if growing[place] >= 2 and below == 1:
            shape = next(big for big in large_outputs if len(big) >= 2)
            yield f"{pretty(graph.names[place])} gives one value per pair of rows, shape {shape}"
            return


def _dims_that_grow(big: Sequence[int], little: Sequence[int], ratio: float) -> int:
    """How many dims are proportional to rows."""
    if len(big) != len(little):
        return 0
    growth = [b / s for b, s in zip(big, little, strict=True) if s and b != s]
    return sum(abs(factor - ratio) < 1e-9 for factor in growth)


def _come_back(graph: Graph, labels: Sequence[Label]) -> Iterator[str]:
    """The first node with rows that takes in a value of the whole piece, such as the mean over the batch."""
    for place, edges in enumerate(graph.edges):
        for child in edges:
            if child >= 0 and labels[place] is Label.ROWS and labels[child] is Label.COLLAPSED:
                yield (
                    f"{pretty(graph.names[place])} brings {pretty(graph.names[child])}, "
                    "a value over all rows of the piece, back to each row"
                )
                return


def _scaled_by_frequency(graph: Graph) -> Iterator[str]:
    """The first embedding that divides its gradient by how often an entry comes in the mini-batch."""
    for node, name in zip(graph.nodes, graph.names, strict=True):
        if name.startswith("Embedding") and getattr(node, "_saved_scale_grad_by_freq", False):
            yield f"{pretty(name)} scales its gradient by frequencies in the piece (scale_grad_by_freq)"
            return


def pretty(name: str) -> str:
    """The operation's name as users know it: `MseLossBackward0` -> `MseLoss`."""
    return name.removeprefix("torch::autograd::").rstrip("0123456789").removesuffix("Backward")
