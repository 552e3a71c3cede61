"""One cut of the probe: what a piece and its two halves show, and whether their numbers refute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.exact import evidence, graph, law, mixed, scale, shares
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen, Trial
from anybatch.exact.law import Law
from anybatch.exact.learn import Mislabelled, learn
from anybatch.exact.pattern import Pattern, weighted
from anybatch.exact.reading import OtherGraph
from anybatch.exact.rehearsal import Rehearsal, Rehearse
from anybatch.exact.scale import CannotScale, Plan
from anybatch.exact.terms import Kind, Term
from anybatch.exact.whole import Weigh, Whole, own_terms, run_whole


@dataclass(frozen=True)
class Result:
    """What one cut says: a pattern, or why it can't be, and whether its rows and numbers showed all of it."""

    pattern: Pattern
    causes: tuple[str, ...] = ()
    is_clear: bool = True
    is_compared: bool = True
    is_wide: bool = False
    scales_rows: bool = False

    def ends_search(self, known: Sequence[Pattern]) -> bool:
        """Does it say all, of rows no wider than a piece, and something new?"""
        is_new = all(self.pattern.terms != other.terms for other in known)
        return self.is_clear and not self.is_wide and is_new


def examine(rehearse: Rehearse, cut: Cut, weigh: Weigh, known: Sequence[Pattern]) -> Result:
    """Runs a piece and its halves, learns the laws that they show, and compares halves and piece by these.

    Args:
        rehearse: Runs the function.
        cut: The rows, and where they are halved.
        weigh: The caller's weights.
        known: Patterns that a piece was found not to have.

    Raises:
        NoRoom: Out of memory.
    """
    whole = run_whole(rehearse, cut, weigh)
    if whole.refusals:
        return Result(_by_rows(whole), whole.refusals)
    keeps = bool(whole.leaves)
    records = whole.is_recorded
    runs = [rehearse(start, stop, keeps=keeps, records=records) for start, stop in cut.halves]
    try:
        _check_form(whole, runs)
        whole, halves, is_other_form = _see_halves(whole, runs)
    except OtherGraph as difference:
        cause = f"rows {cut.start} to {cut.stop} and their halves have different losses: {difference}"
        mixed = _probe_mixed(rehearse, cut, weigh, known, runs)
        return mixed or Result(_by_rows(whole), (cause,), is_clear=False)
    try:
        learnt, causes = learn(whole, halves, cut)
    except Mislabelled:
        whole = replace(whole, terms=whole.own_terms, seen=whole.own_seen, is_labelled=False)
        halves = [evidence.see(run, whole.terms) for run in runs]
        learnt, causes = learn(whole, halves, cut)
    is_clear = _shows_all(whole, halves, cut)
    # Numbers refute also where nothing counts in one of the halves.
    is_sound = whole.is_labelled and all(term.kind is not Kind.OPAQUE for term in whole.terms)
    is_doubtful = any(reading.is_doubtful for seen in (whole.seen, *halves) for reading in seen.readings)
    says_nothing = bool(known) and (is_doubtful or not whole.is_labelled)
    if causes:
        stands = is_clear or (is_sound and whole.seen.is_finite)
        return Result(learnt, causes, stands and not (is_other_form or says_nothing))
    if not whole.seen.is_finite and not whole.not_comparable:
        return Result(replace(learnt, is_proved=False), (), is_clear)
    doubt = whole.not_comparable and f"{whole.not_comparable}, so the pieces were not compared with the whole"
    if not doubt:
        compared, causes = _compare(rehearse, weigh, learnt, whole, halves, runs, cut)
        if not causes or _repeats_itself(rehearse, cut, whole.seen.losses, whole.allowed):
            stands = (is_clear or is_sound) and not says_nothing
            is_clear = stands if causes else is_clear
            return Result(compared, causes, is_clear, scales_rows=whole.scales_rows)
        doubt = (
            "two runs on the same rows differ (random numbers of its own, or state?), so nothing was compared"
        )
    return Result(replace(learnt, warnings=(*learnt.warnings, doubt)), (), is_clear, is_compared=False)


def _probe_mixed(
    rehearse: Rehearse, cut: Cut, weigh: Weigh, known: Sequence[Pattern], halves: Sequence[Rehearsal]
) -> Result | None:
    """What a piece shows whose halves have different forms, of which at least one is known."""
    given = [weigh(start, stop) for start, stop in cut.halves]
    if any(one for said in given for one in said):
        return None
    whole = rehearse(cut.start, cut.stop, keeps=False)
    if any(len(half.losses) != len(whole.losses) for half in halves):
        return None
    try:
        form = mixed.known_form(whole, known) or mixed.new_form(whole, halves, known, cut)
    except law.NoLaw as reason:
        return Result(weighted([Law.ROWS] * len(whole.losses)), (str(reason),))
    patterns = [*known, form.pattern] if form else []
    forms = [one for half in halves if (one := mixed.known_form(half, patterns))]
    if form is None or len(forms) < len(halves):
        return None
    cause = None if whole.not_comparable else mixed.disagreement(whole, forms, given, cut)
    allowed = evidence.tolerance(graph.read(whole.losses))
    if cause and _repeats_itself(rehearse, cut, form.seen.losses, allowed):
        return Result(form.pattern, (cause,))
    return Result(form.pattern)


def _check_form(whole: Whole, halves: Sequence[Rehearsal]) -> None:
    """Looks whether an unread loss has one form in a half and another one in the other.

    Raises:
        OtherGraph: It has.
    """
    alike = [graph.outline(half.losses).structure == whole.structure for half in halves]
    if not whole.is_labelled and not any(whole.given) and any(alike) and not all(alike):
        raise OtherGraph("one half has the graph of both together, the other has not")


def _see_halves(whole: Whole, runs: Sequence[Rehearsal]) -> tuple[Whole, list[Seen], bool]:
    """What the halves say, and the piece beside them; are they computed in another way than the piece?

    Raises:
        OtherGraph: They have other losses.
    """
    try:
        return whole, [evidence.see(run, whole.terms) for run in runs], False
    except OtherGraph:
        other = _in_another_form(whole, runs)
        if other is None:
            raise
    return *other, True


def _shows_all(whole: Whole, halves: Sequence[Seen], cut: Cut) -> bool:
    """Did something count in every term, in the piece and in its halves?

    Rows of other forms beside each other are for the narrower cuts to tell apart.
    """
    is_one_form = whole.is_labelled or not cut.is_wide
    counts = all(_counts(whole.terms, seen) for seen in (whole.seen, *halves))
    return is_one_form and counts and whole.seen.is_finite


def _repeats_itself(
    rehearse: Rehearse, cut: Cut, losses: Sequence[float], allowed: evidence.Tolerance
) -> bool:
    """Do two runs on the same rows give the same losses?"""
    again = rehearse(cut.start, cut.stop, keeps=False, records=False)
    values = [float(loss.detach().double()) for loss in again.losses]
    return all(
        abs(one - other) <= allowed.slack(one, other) for one, other in zip(values, losses, strict=True)
    )


def _in_another_form(whole: Whole, runs: Sequence[Rehearsal]) -> tuple[Whole, list[Seen]] | None:
    """Halves that are computed in another way than the piece (one row often is), each read in its own way."""
    forms = [own_terms(run) for run in runs]
    readable = [*forms[0], *whole.own_terms]
    if not len(forms[0]) == len(forms[1]) == len(whole.own_terms):
        return None
    if forms[0] != forms[1] or any(term.kind is not Kind.ROWS for term in readable) or any(whole.given):
        return None
    halves = [evidence.see(run, forms[0]) for run in runs]
    return replace(whole, terms=forms[0], seen=whole.own_seen, is_labelled=False), halves


def _counts(known: Sequence[Term], seen: Seen) -> bool:
    """Does something of the rows count in every term? Zero is no value for a term that can't be read."""
    return all(
        reading.weight and reading.amount and (term.kind is not Kind.OPAQUE or part != 0)
        for term, reading, part in zip(known, seen.readings, seen.parts, strict=True)
    )


def _by_rows(whole: Whole) -> Pattern:
    return weighted([Law.ROWS] * len(whole.given))


def _compare(
    rehearse: Rehearse,
    weigh: Weigh,
    known: Pattern,
    whole: Whole,
    halves: Sequence[Seen],
    runs: Sequence[Rehearsal],
    cut: Cut,
) -> tuple[Pattern, tuple[str, ...]]:
    """Scales the halves by the laws and compares them with the piece: values first, then gradients.

    Returns:
        The pattern, with the law of what is left beside its terms, and why it can't be.
    """
    given = [weigh(start, stop) for start, stop in cut.halves]
    pieces = [
        shares.weigh(known, half.readings, rows, amounts)
        for half, rows, amounts in zip(halves, cut.rows, given, strict=True)
    ]
    totals = shares.totals(pieces)
    factors = [shares.factors(piece, totals) for piece in pieces]
    try:
        plans = _plans(known, halves, factors)
    except CannotScale as reason:
        return known, (str(reason),)
    trial = Trial(known, cut.rows, whole.seen, halves, factors, plans, whole.allowed)
    verdicts = [evidence.compare_values(trial, root) for root in range(known.losses)]
    causes = tuple(verdict.cause for verdict in verdicts if verdict.cause)
    remainders = tuple(verdict.remainder for verdict in verdicts)
    learnt = replace(known, remainders=remainders, uses_values=any(remainders))
    if causes or not whole.leaves or not _compare_gradients(whole, runs, plans, part=0.5):
        return learnt, causes
    # Half of the loss may not have half of the gradient, though: a hook clips gradients, say.
    again = [rehearse(start, stop, keeps=True, records=False) for start, stop in cut.halves]
    plans = _plans(known, [evidence.see(run, known.terms) for run in again], factors)
    cause = _compare_gradients(whole, again, plans, part=1.0)
    return replace(learnt, is_linear=False), (cause,) if cause else ()


def _plans(known: Pattern, halves: Sequence[Seen], factors: Sequence[Sequence[float]]) -> list[list[Plan]]:
    return [
        scale.plans(known, half.readings, factor, len(halves), is_final=True)
        for half, factor in zip(halves, factors, strict=True)
    ]


def _compare_gradients(
    whole: Whole, runs: Sequence[Rehearsal], plans: Sequence[Sequence[Plan]], *, part: float
) -> str | None:
    """Do the halves' gradients add up to the piece's? The halves are run backward with a part of the loss."""
    halves = [
        evidence.gradients(run, whole.leaves, plan, part) for run, plan in zip(runs, plans, strict=True)
    ]
    return evidence.compare_gradients(whole.gradients, halves, whole.allowed)
