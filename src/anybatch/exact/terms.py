"""The terms of a loss: from the root of its graph down through linear nodes to where rows are summed up.

    loss = cross_entropy(...) + 0.1 * mse(...) + weight_decay
           AddBackward
           ├── AddBackward
           │   ├── NllLossBackward          a term
           │   └── MulBackward (0.1)
           │       └── MseLossBackward      a term
           └── ...                          parameters only: the same for every piece

A term is known by its path from the root, so a later piece is read by following the path, not by
labelling its graph again.
"""

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.autograd.graph import Node

from anybatch.exact import nodes, operations
from anybatch.exact.graph import is_custom, name_of
from anybatch.exact.labels import Label, Labelled, pretty

Key = tuple[object, ...]
"""What tells a term from others, the same in every piece."""


class Kind(enum.Enum):
    """What can be said of a term: it is read, or can't be, or has no rows at all."""

    ROWS = "rows"
    OPAQUE = "opaque"
    PARAMETERS = "parameters"


@dataclass(frozen=True)
class Step:
    """A linear node on the way to a term: its name, which inputs need grad, and the one to follow."""

    name: str
    inputs: tuple[bool, ...]
    edge: int


@dataclass(frozen=True)
class Term:
    """One mean or sum inside a loss.

    Attributes:
        root: Which of the losses it belongs to.
        path: The steps from the root down to, and without, the node that sums up the rows.
        end: The name of that node; empty where any will do.
        kind: Whether its denominator can be read, can't, or it has no rows at all.
        branch: The number of leading steps that it shares with other terms.
        learned: The steps at which it is multiplied by something made of parameters.
        occurrence: Its number among the terms of the same shape.
    """

    root: int
    path: tuple[Step, ...]
    end: str
    kind: Kind
    branch: int = 0
    learned: tuple[int, ...] = ()
    occurrence: int = 0

    @cached_property
    def key(self) -> Key:
        """Equal for the same term of two pieces, of which one may have more terms beside it."""
        return (*self._shape, self.occurrence)

    @cached_property
    def _shape(self) -> Key:
        skipped = {"AddBackward0", "SubBackward0"}
        names = tuple(step.name for step in self.path if step.name not in skipped)
        return (self.root, names, self.end, self.kind)


def unlabelled(root: int, node: Node | None = None) -> Term:
    """A whole loss as one term, where labels are missing: of its graph only the single way down is read.

    That way may end at a mean or a sum. Where it branches before, the term is opaque, but for the constants
    on the way.
    """
    path: list[Step] = []
    while node is not None:
        name, children = name_of(node), [child for child, _ in node.next_functions]
        inputs = needed(children)
        if _is_readable(node, name):
            return Term(root, tuple(path), name, Kind.ROWS)
        if sum(inputs) != 1 or name not in operations.LINEAR | operations.SCALING:
            break
        path.append(Step(name, inputs, inputs.index(True)))
        node = children[inputs.index(True)]
    return Term(root, tuple(path), "", Kind.OPAQUE)


@dataclass
class Findings:
    """What a walk from the root found: terms, and what stands in the way."""

    terms: list[Term] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    is_labelled: bool = True


def find(labelled: Labelled, wanted: Collection[int]) -> Findings:
    """Finds the terms of the wanted losses, and the operations that no sum over pieces can give."""
    found = Findings()
    for index, root in enumerate(labelled.graph.roots):
        if index in wanted:
            _descend(labelled, root, index, (), (), found)
    seen: Counter[Key] = Counter()
    numbered = []
    for term in found.terms:
        numbered.append(replace(term, branch=_shared_steps(term, found.terms), occurrence=seen[term._shape]))
        seen[term._shape] += 1
    found.terms = numbered
    found.refusals = list(dict.fromkeys(found.refusals))
    return found


def _descend(
    labelled: Labelled,
    place: int,
    root: int,
    path: tuple[Step, ...],
    learned: tuple[int, ...],
    found: Findings,
) -> None:
    graph, labels = labelled.graph, labelled.labels
    name, edges, node = graph.names[place], graph.edges[place], graph.nodes[place]
    inputs = tuple(child >= 0 for child in edges)
    kids = {edge: labels[child] for edge, child in enumerate(edges) if child >= 0}

    def end(kind: Kind) -> None:
        found.terms.append(Term(root, path, name, kind, learned=learned))

    def go_on(edge: int, learned: tuple[int, ...]) -> None:
        _descend(labelled, edges[edge], root, (*path, Step(name, inputs, edge)), learned, found)

    if labels[place] is Label.PARAMETERS:
        end(Kind.PARAMETERS)
    elif labels[place] is Label.ROWS or Label.ROWS in kids.values() or is_custom(node):
        if name in operations.PICKING:
            found.refusals.append(f"{pretty(name)} over the rows of a piece is not a sum over rows")
        elif Label.COLLAPSED in kids.values():
            found.refusals.append(f"{pretty(name)} multiplies rows with a value over all rows of the piece")
        else:
            end(Kind.ROWS if _is_readable(node, name) else Kind.OPAQUE)
    elif name in operations.LINEAR:
        for edge in kids:
            go_on(edge, learned)
    elif name in operations.SCALING and _is_linear_here(name, kids):
        (edge,) = (edge for edge, kid in kids.items() if kid is Label.COLLAPSED)
        go_on(edge, (*learned, len(path)) if len(kids) > 1 else learned)
    elif name in operations.NONLINEAR | operations.SCALING:
        found.refusals.append(f"{pretty(name)} of a value over all rows of the piece is not linear in it")
    else:
        end(Kind.OPAQUE)


def _is_linear_here(name: str, kids: dict[int, Label]) -> bool:
    collapsed = [edge for edge, kid in kids.items() if kid is Label.COLLAPSED]
    return len(collapsed) == 1 and (name in operations.PRODUCTS or collapsed == [0])


def _is_readable(node: Node, name: str) -> bool:
    try:
        with nodes.outside_modes():
            nodes.denominator(node, name)
    except nodes.Unreadable:
        return False
    return True


def _shared_steps(term: Term, terms: Sequence[Term]) -> int:
    """How many leading steps the term shares with any other term of its root, the branching node included."""
    longest = 0
    for other in terms:
        if other is term or other.root != term.root:
            continue
        common = 0
        for mine, theirs in zip(term.path, other.path, strict=False):
            if mine != theirs:
                break
            common += 1
        longest = max(longest, common + 1)
    return longest


def needed(children: Sequence[Node | None]) -> tuple[bool, ...]:
    """Which inputs of a node need grad."""
    return tuple(child is not None for child in children)
