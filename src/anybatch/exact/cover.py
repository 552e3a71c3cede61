"""Leaves that see all of a backward pass: below each operation lies one of them.

What changes a gradient on its way and no value (a tensor hook, a backward of one's own, a part that is
detached) shows only in the gradients of the leaves below it. A few small leaves see every such place, and
cost much less than all gradients: the walk down, without most of the products for weights.
"""

from collections.abc import Callable

import torch

from anybatch.exact import operations
from anybatch.exact.graph import LEAF, Graph, is_custom, leaf_of

_MOST_ELEMENTS = 1 << 22


def covering_leaves(graph: Graph, accept: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Accepted leaves, of which each node has one below it: small ones where there is a choice, but no bias.

    The gradient of a bias is a sum over rows, and does not tell which row had which part of it.
    A custom node has one below each of its inputs: its backward may treat them unlike each other. Only what
    reshapes a single leaf, as the transpose of a weight does, goes without.
    """
    chosen: set[int] = set()
    is_covered: list[bool] = []
    is_plain: list[bool] = []
    cheapest: list[int | None] = []
    cost: dict[int, tuple[bool, int]] = {}
    for place, (name, edges) in enumerate(zip(graph.names, graph.edges, strict=True)):
        below = [child for child in edges if child >= 0]
        if name == LEAF:
            leaf = leaf_of(graph.nodes[place])
            cost[place] = leaf.ndim < 2, leaf.numel()
            cheapest.append(place if accept(leaf) else None)
            is_plain.append(True)
            is_covered.append(False)
            continue
        known = [one for child in below if (one := cheapest[child]) is not None]
        cheapest.append(min(known, key=cost.__getitem__, default=None))
        is_plain.append(len(below) == 1 and is_plain[below[0]] and name in operations.LINEAR)
        covered = any(is_covered[child] or child in chosen for child in below)
        if is_custom(graph.nodes[place]):
            chosen.update(one for one in known if cost[one][1] <= _MOST_ELEMENTS)
        mine = cheapest[place]
        if not covered and not is_plain[place] and mine is not None:
            chosen.add(mine)
            covered = True
        is_covered.append(covered)
    return [leaf_of(graph.nodes[place]) for place in sorted(chosen)]
