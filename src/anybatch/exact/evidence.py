"""Numbers that can refute a law: the halves of a piece, scaled, against the piece."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anybatch.exact import hooks, law
from anybatch.exact.clamps import resolved
from anybatch.exact.graph import Graph, lowest_precision, node_of
from anybatch.exact.law import Law
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import OtherGraph, Reading, follow
from anybatch.exact.rehearsal import Rehearsal
from anybatch.exact.scale import Plan, install, seeded
from anybatch.exact.terms import Term
from anybatch.exact.values import parts

_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4}
_ABSOLUTE = {torch.float64: 1e-13, torch.float32: 1e-6}


@dataclass(frozen=True)
class Tolerance:
    """How far two computations of the same number may lie apart, from the lowest dtype in the graph."""

    relative: float
    absolute: float

    def slack(self, *values: float) -> float:
        return self.relative * max(abs(value) for value in values) + self.absolute


def tolerance(graph: Graph) -> Tolerance:
    """How far two numbers from one graph may differ by rounding: as its coarsest dtype rounds."""
    lowest = lowest_precision(graph.nodes)
    return Tolerance(_RELATIVE.get(lowest, 5e-2), _ABSOLUTE.get(lowest, 1e-3))


@dataclass(frozen=True, eq=False)
class Seen:
    """What one run says of the losses.

    Attributes:
        losses: Their values.
        readings: What each term divides by.
        parts: What each term adds to its loss; None where that was not to be seen.
    """

    losses: tuple[float, ...]
    readings: tuple[Reading, ...]
    parts: tuple[float | None, ...]

    @property
    def is_finite(self) -> bool:
        return all(abs(loss) < float("inf") for loss in self.losses)


def see(run: Rehearsal, terms: Sequence[Term]) -> Seen:
    """Reads the terms of a rehearsal, and what each adds to its loss.

    Raises:
        OtherGraph: It has other terms.
    """
    tops = [node_of(loss) for loss in run.losses]
    if terms and len(tops) != 1 + max(term.root for term in terms):
        raise OtherGraph(f"{len(tops)} losses")
    readings = resolved([follow(term, tops[term.root]) for term in terms], run.clamps)
    losses = tuple(float(loss.detach().double()) for loss in run.losses)
    return Seen(losses, readings, parts(run.losses, run.values, terms, readings))


@dataclass(frozen=True, eq=False)
class Trial:
    """A piece against its halves.

    Attributes:
        pattern: The terms and laws on trial.
        rows: The number of rows of each half.
        whole: What the piece showed.
        halves: What each half showed.
        factors: For each half the factor of each term.
        plans: For each half how to run backward through each loss.
        allowed: How close is equal.
    """

    pattern: Pattern
    rows: Sequence[int]
    whole: Seen
    halves: Sequence[Seen]
    factors: Sequence[Sequence[float]]
    plans: Sequence[Sequence[Plan]]
    allowed: Tolerance


@dataclass(frozen=True)
class Verdict:
    """What the values of one loss say: the law of what is left beside its terms, or why they don't fit."""

    remainder: Law | None = None
    cause: str | None = None


def compare_values(trial: Trial, root: int) -> Verdict:
    """Do the values of the halves give that of the whole?"""
    expected = trial.whole.losses[root]
    values = [half.losses[root] for half in trial.halves]
    slack = trial.allowed.slack(expected, *_finite(values))
    commons = [plans[root].common for plans in trial.plans]
    if _combine(values, commons, expected, slack):
        return Verdict()
    coupled = Verdict(
        cause=f"the loss depends on which rows are together: {values[0]:.8g} and {values[1]:.8g} "
        f"for {trial.rows[0]} and {trial.rows[1]} rows do not combine to {expected:.8g} for all of them "
        "(values normalised over the batch, rows mixed or compared with each other?)"
    )
    mine = _own_terms(trial.pattern, root)
    for place in mine:
        pieces = [half.parts[place] for half in trial.halves]
        scales = [factors[place] for factors in trial.factors]
        if not _combine(pieces, scales, trial.whole.parts[place], slack):
            return coupled
    rests = [seen.losses[root] - sum(seen.parts[place] or 0.0 for place in mine) for seen in trial.halves]
    rest = expected - sum(trial.whole.parts[place] or 0.0 for place in mine)
    remainder = _law_of_rest(rest, rests, trial.rows, slack)
    return Verdict(remainder) if remainder else coupled


def _own_terms(pattern: Pattern, root: int) -> list[int]:
    return [
        place
        for place, term in enumerate(pattern.terms)
        if term.root == root and pattern.law(term).law is not Law.ONCE
    ]


def _combine(
    values: Sequence[float | None], scales: Sequence[float | None], expected: float | None, slack: float
) -> bool:
    """Do the values, scaled, add up to the expected one? What is scaled by zero does not count, even nan."""
    if expected is None or None in values or None in scales:
        return False
    total = sum(
        scale * value for scale, value in zip(scales, values, strict=True) if scale and value is not None
    )
    return abs(total - expected) <= slack


def _law_of_rest(whole: float, halves: Sequence[float], rows: Sequence[int], slack: float) -> Law | None:
    if all(not abs(half) < float("inf") or abs(half - whole) <= slack for half in halves):
        return Law.ONCE
    return law.of_values(whole, halves, rows, slack)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if abs(value) < float("inf")]


def gradients(
    run: Rehearsal, leaves: Sequence[torch.Tensor], planned: Sequence[Plan] | None = None, part: float = 1.0
) -> list[torch.Tensor]:
    """The gradients of a run's losses, scaled as planned, at some leaves. Frees the graph.

    Args:
        run: Whose graph to go through.
        leaves: Where to.
        planned: How each loss is scaled; None for as it is.
        part: What is sent through instead of 1. The gradients are divided by it, which makes no difference
            where backward is linear.
    """
    if not leaves:
        return []
    if planned is not None:
        install(planned)
    with hooks.aside(leaves), run.conditions(), torch.inference_mode(False), torch.enable_grad():
        roots = run.losses if planned is None else seeded(run.losses, planned)
        found = torch.autograd.grad([root * part for root in roots], leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else _dense(gradient) / part
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()


def compare_gradients(
    expected: Sequence[torch.Tensor], halves: Sequence[Sequence[torch.Tensor]], allowed: Tolerance
) -> str | None:
    """Do the gradients of the halves add up to that of the whole? Where not, says so."""
    if not expected:
        return None
    largest = max(
        float(gradient.abs().max()) for gradient in [*expected, *(g for half in halves for g in half)]
    )
    worst = max(
        float((sum(parts[1:], parts[0]) - whole).abs().max())
        for whole, *parts in zip(expected, *halves, strict=True)
    )
    if not worst > allowed.relative * largest:
        return None
    return (
        "the gradient depends on which rows are together, through values that the graph holds for constants: "
        f"the halves of a piece give another gradient, by {worst / largest:.2g} of its largest value"
    )
