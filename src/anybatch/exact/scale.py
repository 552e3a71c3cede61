"""Backward through the losses of a piece, with each term scaled by its factor.

A term is scaled at the highest node that belongs to it alone, so that a learned coefficient
(`exp(-s) * loss + s`) gets its share too. A factor of zero is put in where the rows are summed up: further
up it would meet the 0/0 of an empty mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from anybatch.exact.law import Law
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import Reading
from anybatch.exact.shares import common_factor
from anybatch.exact.terms import Term


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A term of a piece with its law and factor."""

    term: Term
    reading: Reading
    law: Law
    factor: float


@dataclass(frozen=True)
class Plan:
    """How to run backward: the seed of a loss, and the nodes at which its gradient is scaled on the way.

    Attributes:
        seed: The gradient with which backward starts.
        hooks: Nodes and factors.
        common: The factor that all terms have in this piece, None where they differ.
    """

    seed: float
    hooks: tuple[tuple[Node, float], ...]
    common: float | None


class CannotScale(Exception):
    """Two terms with different factors meet in one node."""


def plans(
    pattern: Pattern, readings: Sequence[Reading], factors: Sequence[float], pieces: int, *, is_final: bool
) -> list[Plan]:
    """How to run backward through each loss of a piece.

    Args:
        pattern: The terms of the losses, and their laws.
        readings: What the piece says of each term.
        factors: What each term is to be multiplied with.
        pieces: The number of pieces.
        is_final: Are the factors those of the whole mini-batch, up to a common ratio that is known?

    Raises:
        CannotScale: A node belongs to terms with different factors.
    """
    items = [
        _Scaled(term, reading, pattern.law(term).law, factor)
        for term, reading, factor in zip(pattern.terms, readings, factors, strict=True)
    ]
    by_root = ([item for item in items if item.term.root == root] for root in range(pattern.losses))
    return [_plan(mine, pieces, is_final) for mine in by_root]


def _plan(items: Sequence[_Scaled], pieces: int, is_final: bool) -> Plan:
    common = common_factor([(item.law, item.factor) for item in items], pieces)
    split = [item for item in items if item.law is not Law.ONCE]
    once = [item.factor for item in items if item.law is Law.ONCE]
    seed = _seed(split, once[0], common, is_final) if once else common or 1.0
    return Plan(seed, tuple(_hooks(split, seed)), common)


def _seed(split: Sequence[_Scaled], once: float, common: float | None, is_final: bool) -> float:
    """What reaches the terms that are the same for every piece (a weight decay); all seeds sum to 1.

    Where the other terms are still to be multiplied with an unknown ratio, these go along with them, as far
    as they have one factor: shares that sum to 1 by then.
    """
    goes_along = not is_final and all(item.law in (Law.MEAN, Law.ROWS) for item in split)
    return common if goes_along and common is not None else once


def _hooks(items: Sequence[_Scaled], seed: float) -> list[tuple[Node, float]]:
    ends = [item.reading.end for item in items]
    meet = len(set(ends)) < len(ends)
    hooks: dict[Node, float] = {}
    for item in items:
        factor = item.factor / seed if item.factor else 0.0
        if factor != 1.0 and _scales_too_low(item.term, meet):
            raise CannotScale(
                "a learned coefficient multiplies a sum of terms with different denominators; "
                "return the terms as a dict of losses"
            )
        node = item.reading.end if meet else item.reading.top if factor else item.reading.stop
        if hooks.setdefault(node, factor) != factor:
            raise CannotScale(f"{item.term.end} belongs to two terms with different denominators")
    return [(node, factor) for node, factor in hooks.items() if factor != 1.0]


def _scales_too_low(term: Term, meet: bool) -> bool:
    """Is there a learned coefficient above the node where the term is scaled? It would get another share."""
    return bool(term.learned) and (meet or min(term.learned) < term.branch)


def install(plans: Sequence[Plan]) -> None:
    """Hooks the plans' nodes. The hooks die with the graph."""
    for planned in plans:
        for node, factor in planned.hooks:
            if factor:
                node.register_prehook(_Scaler(factor))
            else:
                node.register_hook(_zero)


@dataclass(frozen=True)
class _Scaler:
    factor: float

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if grad is None else grad * self.factor for grad in gradients)


def _zero(
    gradients: tuple[torch.Tensor | None, ...], _above: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """What leaves a node that sums up nothing: its own backward may divide by zero."""
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in gradients)


def exact_share(losses: Sequence[torch.Tensor], plans: Sequence[Plan]) -> float:
    """What a loss of less than 32 bits is not to be multiplied with, for it would round it.

    Returns:
        The seed of the first loss without its power of two; 1 where losses have more digits.
    """
    if all(torch.finfo(loss.dtype).bits >= 32 for loss in losses):
        return 1.0
    return 2 * abs(math.frexp(plans[0].seed)[0])


def seeded(losses: Sequence[torch.Tensor], plans: Sequence[Plan], share: float = 1.0) -> list[torch.Tensor]:
    """The losses times their seeds, for backward to start from; but for a share that gradients get later.

    Not the seeds as gradients: to compare their sizes torch imports a library for symbols (2.13).
    """
    return [
        loss if planned.seed == share else loss * (planned.seed / share)
        for loss, planned in zip(losses, plans, strict=True)
    ]
