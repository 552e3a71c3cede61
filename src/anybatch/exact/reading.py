"""What one piece says of a term: its path followed on the piece's graph, for what it divides by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from anybatch.exact import nodes, operations
from anybatch.exact.graph import name_of
from anybatch.exact.labels import pretty
from anybatch.exact.masks import is_masked_out, shows_what_counts
from anybatch.exact.terms import Kind, Term, needed


@dataclass(frozen=True, eq=False)
class Reading:
    """What one piece says of one term.

    Attributes:
        denominator: What its mean divides by, constants on the path included.
        is_masked: Does nothing of the piece count?
        is_doubtful: Does it divide by exactly 1, with no mask to tell whether that is a count or its clamp?
        may_clamp: Does it divide by a number, with no mask to tell whether that is a clamp?
        counted: What that number was before it was clamped, constants included; None where it is not known.
        top: The highest node that belongs to this term alone.
        end: The node that sums up the rows.
        stop: The node at which the term is cut off where it counts nothing: the end, or the highest learned
            coefficient of the term alone, whose gradient would be a product with its nan.
        scalars: Constants on the path that have one element.
        vectors: Those that have more.
    """

    denominator: float
    is_masked: bool
    is_doubtful: bool
    may_clamp: bool
    counted: float | None
    top: Node
    end: Node
    stop: Node
    scalars: tuple[nodes.Constant, ...]
    vectors: tuple[torch.Tensor, ...]

    @property
    def amount(self) -> float:
        """What the piece adds to what the whole divides by."""
        return self.denominator if self.counted is None else self.counted

    @property
    def weight(self) -> float:
        """The denominator, or 0 where the piece has nothing that counts."""
        return 0.0 if self.is_masked else self.denominator


class OtherGraph(Exception):
    """The piece's loss does not have the terms that it was expected to have."""


def follow(term: Term, root: Node) -> Reading:
    """Reads a term on a piece's graph, along its path.

    Raises:
        OtherGraph: The path leads elsewhere, or a constant on it was changed in place.
    """
    trail = _trail(term, root)
    try:
        with nodes.outside_modes():
            return _read(term, trail)
    except nodes.Unreadable as reason:
        raise OtherGraph(f"{pretty(term.end)}, which can't be read: {reason}") from reason


def _trail(term: Term, root: Node) -> list[Node]:
    trail = [root]
    for step in term.path:
        node = trail[-1]
        children = [child for child, _ in node.next_functions]
        below = children[step.edge] if step.edge < len(children) else None
        if name_of(node) != step.name or needed(children) != step.inputs or below is None:
            raise OtherGraph(f"{pretty(node.name())} instead of {pretty(step.name)}")
        trail.append(below)
    if term.end and name_of(trail[-1]) != term.end:
        raise OtherGraph(f"{pretty(trail[-1].name())} instead of {pretty(term.end)}")
    return trail


def _read(term: Term, trail: Sequence[Node]) -> Reading:
    steps = zip(trail, term.path, strict=False)
    found = [constant for node, step in steps if (constant := nodes.constant(node, step.name, step.edge))]
    scalars = tuple(constant for constant in found if constant.elements == 1)
    vectors = tuple(constant.tensor() for constant in found if constant.elements != 1)
    if term.kind is Kind.PARAMETERS:
        vectors = (*(constant.tensor() for constant in scalars), *vectors, *_constants_below(trail[-1]))
    has_divisor = any(constant.divides for constant in found)
    own = nodes.denominator(trail[-1], term.end) if term.kind is Kind.ROWS else 1.0
    own_learned = [place for place in term.learned if place >= term.branch]
    counts_nothing = any(map(_is_infinite, scalars)) and is_masked_out(trail[-1])
    divisor = 0.0 if counts_nothing else _divisor(scalars)
    is_counted = term.kind is not Kind.PARAMETERS and has_divisor
    is_masked = is_counted and is_masked_out(trail[-1])
    may_clamp = is_counted and not (is_masked or shows_what_counts(trail[-1]))
    return Reading(
        denominator=float(own) * divisor,
        is_masked=is_masked,
        is_doubtful=may_clamp and divisor == 1.0,
        may_clamp=may_clamp,
        counted=None,
        top=trail[term.branch],
        end=trail[-1],
        stop=trail[min(own_learned)] if own_learned else trail[-1],
        scalars=scalars,
        vectors=vectors,
    )


def _is_infinite(constant: nodes.Constant) -> bool:
    """Does it multiply with the reciprocal of zero? So does a mean over nothing."""
    return not constant.divides and math.isinf(constant.value)


def _divisor(scalars: Sequence[nodes.Constant]) -> float:
    """What scalar constants divide by together.

    A zero takes its term out, whatever it is divided by. What is not finite says nothing of it.
    """
    divisor = 1.0
    for constant in scalars:
        value = float(constant.value)
        if not math.isfinite(value):
            continue
        if constant.divides:
            divisor *= value
        elif value:
            divisor /= value
    return divisor


def _constants_below(node: Node) -> list[torch.Tensor]:
    """The constants in a subtree of parameters: data of the piece may have come in through them."""
    found: list[torch.Tensor] = []
    stack: list[Node] = [node]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        name = node.name()
        if node in seen or name not in operations.LINEAR | operations.SCALING | operations.CONTRACTIONS:
            continue
        seen.add(node)
        for edge, (child, _) in enumerate(node.next_functions):
            if child is not None:
                stack.append(child)
                constant = nodes.constant(node, name, edge)
                found += [constant.tensor()] if constant else []
    return found
