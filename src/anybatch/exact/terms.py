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

import torch
from torch.autograd.graph import Node

from anybatch.exact import nodes
from anybatch.exact.graph import is_custom
from anybatch.exact.labels import Label, Labelled, pretty
from anybatch.exact.masks import is_masked_out


class Kind(enum.Enum):
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

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same term of two pieces, of which one may have more terms beside it."""
        return (*self._shape, self.occurrence)

    @property
    def _shape(self) -> tuple[object, ...]:
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
        name, children = node.name(), [child for child, _ in node.next_functions]
        needed = _needed(children)
        if _is_readable(node, name):
            return Term(root, tuple(path), name, Kind.ROWS)
        if sum(needed) != 1 or name not in nodes.LINEAR | nodes.PRODUCTS | nodes.RATIOS:
            break
        path.append(Step(name, needed, needed.index(True)))
        node = children[needed.index(True)]
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
    seen: Counter[tuple[object, ...]] = Counter()
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
        if name in nodes.PICKING:
            found.refusals.append(f"{pretty(name)} over the rows of a piece is not a sum over rows")
        elif Label.COLLAPSED in kids.values():
            found.refusals.append(f"{pretty(name)} multiplies rows with a value over all rows of the piece")
        else:
            end(Kind.ROWS if _is_readable(node, name) else Kind.OPAQUE)
    elif name in nodes.LINEAR:
        for edge in kids:
            go_on(edge, learned)
    elif name in nodes.PRODUCTS | nodes.RATIOS and _is_linear_here(name, kids):
        (edge,) = (edge for edge, kid in kids.items() if kid is Label.COLLAPSED)
        go_on(edge, (*learned, len(path)) if len(kids) > 1 else learned)
    elif name in nodes.NONLINEAR | nodes.PRODUCTS | nodes.RATIOS:
        found.refusals.append(f"{pretty(name)} of a value over all rows of the piece is not linear in it")
    else:
        end(Kind.OPAQUE)


def _is_linear_here(name: str, kids: dict[int, Label]) -> bool:
    collapsed = [edge for edge, kid in kids.items() if kid is Label.COLLAPSED]
    return len(collapsed) == 1 and (name in nodes.PRODUCTS or collapsed == [0])


def _is_readable(node: Node, name: str) -> bool:
    try:
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


@dataclass(frozen=True, eq=False)
class Reading:
    """What one piece says of one term.

    Attributes:
        denominator: What its mean divides by, constants on the path included.
        is_masked: Does nothing of the piece count?
        top: The highest node that belongs to this term alone.
        end: The node that sums up the rows.
        stop: The node at which the term is cut off where it counts nothing: the end, or the highest learned
            coefficient of the term alone, whose gradient would be a product with its nan.
        vectors: Constants on the path that have more than one element.
    """

    denominator: float
    is_masked: bool
    top: Node
    end: Node
    stop: Node
    vectors: tuple[torch.Tensor, ...]

    @property
    def weight(self) -> float:
        """The denominator, or 0 where the piece has nothing that counts."""
        return 0.0 if self.is_masked else self.denominator


class OtherGraph(Exception):
    """The piece's loss does not have the terms that it was expected to have."""


def follow(term: Term, root: Node) -> Reading:
    """Reads a term on a piece's graph, along its path.

    Raises:
        OtherGraph: The path leads elsewhere.
        nodes.Unreadable: A constant on the path was changed in place.
    """
    trail = [root]
    for step in term.path:
        node = trail[-1]
        children = [child for child, _ in node.next_functions]
        below = children[step.edge] if step.edge < len(children) else None
        if node.name() != step.name or _needed(children) != step.inputs or below is None:
            raise OtherGraph(f"{pretty(node.name())} instead of {pretty(step.name)}")
        trail.append(below)
    if term.end and trail[-1].name() != term.end:
        raise OtherGraph(f"{pretty(trail[-1].name())} instead of {pretty(term.end)}")
    constants = _constants(term, trail)
    scalars = [value for value, _ in constants if value.numel() == 1]
    has_divisor = any(divides for _, divides in constants)
    ratio = 1.0
    is_masked = term.kind is not Kind.PARAMETERS and has_divisor and is_masked_out(trail[-1])
    for value, divides in constants:
        if value.numel() == 1:
            number = abs(float(value.double()))
            if divides:
                ratio *= number
            elif number:
                ratio /= number
    own = nodes.denominator(trail[-1], term.end) if term.kind is Kind.ROWS else 1.0
    vectors = tuple(value for value, _ in constants if value.numel() != 1)
    if term.kind is Kind.PARAMETERS:
        vectors = (*scalars, *vectors, *_constants_below(trail[-1]))
    own_learned = [place for place in term.learned if place >= term.branch]
    stop = trail[min(own_learned)] if own_learned else trail[-1]
    return Reading(float(own) * ratio, is_masked, trail[term.branch], trail[-1], stop, vectors)


def _needed(children: Sequence[Node | None]) -> tuple[bool, ...]:
    return tuple(child is not None for child in children)


def _constants(term: Term, trail: Sequence[Node]) -> list[tuple[torch.Tensor, bool]]:
    found = (nodes.constant(node, step.name, step.edge) for node, step in zip(trail, term.path, strict=False))
    return [(torch.as_tensor(constant.value), constant.divides) for constant in found if constant]


def _constants_below(node: Node) -> list[torch.Tensor]:
    """The constants in a subtree of parameters: data of the piece may have come in through them."""
    found: list[torch.Tensor] = []
    stack: list[Node] = [node]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        name = node.name()
        if node in seen or name not in nodes.LINEAR | nodes.PRODUCTS | nodes.RATIOS | nodes.CONTRACTIONS:
            continue
        seen.add(node)
        for edge, (child, _) in enumerate(node.next_functions):
            if child is not None:
                stack.append(child)
                constant = nodes.constant(node, name, edge)
                found += [torch.as_tensor(constant.value)] if constant else []
    return found
