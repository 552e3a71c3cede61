"""The probe: a piece and its two halves, forward, to learn a loss's laws and to try to refute them.

The graph shows what a loss divides by. It can't show what came in through constants: advantages
normalised over the batch, targets centred, rows mixed with each other. So the probe also computes: the
halves, scaled by the laws, must give the loss of the piece, and its gradient at the leaves nearest to it
(`evidence.py`). That can refute a law; it can't prove one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.exact import evidence, law, scale, shares
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen, Trial
from anybatch.exact.law import Law
from anybatch.exact.learn import learn
from anybatch.exact.pattern import Pattern, weighted
from anybatch.exact.reading import OtherGraph
from anybatch.exact.rehearsal import NoRoom, Rehearsal, Rehearse
from anybatch.exact.scale import CannotScale
from anybatch.exact.terms import Kind, Term
from anybatch.exact.weights import Given
from anybatch.exact.whole import Weigh, Whole, own_terms, run_whole


class Refuted(Exception):
    """The loss of the pieces is not the loss of the mini-batch. `causes` says why."""

    def __init__(self, causes: Sequence[str], losses: int) -> None:
        super().__init__("; ".join(causes))
        self.causes = tuple(causes)
        self.losses = losses


def probe(
    rehearse: Rehearse, cuts: Sequence[Cut], weigh: Weigh, known: Sequence[Pattern] = ()
) -> list[Pattern]:
    """Learns the pattern of a function's losses, on the first cut that shows all of it.

    Args:
        rehearse: Runs the function.
        cuts: Rows to try, in this order. After the first that are no wider than a piece, others are used
            only where a mask takes out all of a half, or a loss is not finite.
        weigh: The caller's weights.
        known: Patterns that a piece was found not to have; others are looked for.

    Returns:
        Patterns; more than one where some rows have other terms than others, none where there was no memory
        for two rows, or nothing new to learn.

    Raises:
        Refuted: The losses don't add up, as their graphs or their numbers show.
    """
    found: list[_Result] = []
    for cut in cuts:
        try:
            found.append(_probe_once(rehearse, cut, weigh, bool(known)))
        except NoRoom:
            continue
        if found[-1].ends_search(cut, known) and not _needs_another(found):
            break
    clear = [result for result in found if result.is_clear]
    if not clear and known:
        return []
    return _verdict(clear or found)


def _needs_another(found: Sequence[_Result]) -> bool:
    """Is there a constant in a denominator, such as an epsilon, that no other cut has confirmed yet?"""
    clear = [result for result in found if result.is_clear and not result.causes]
    return len(clear) == 1 and any(law.c0 for law in clear[0].pattern.laws.values())


@dataclass(frozen=True)
class _Result:
    """What one cut says: a pattern, why it can't be, and whether the rows showed all of it."""

    pattern: Pattern
    causes: tuple[str, ...] = ()
    is_clear: bool = True

    def ends_search(self, cut: Cut, known: Sequence[Pattern]) -> bool:
        if not self.is_clear:
            return False
        is_new = all(self.pattern.terms != other.terms for other in known)
        return bool(self.causes) or (not cut.is_wide and is_new)


def _verdict(results: Sequence[_Result]) -> list[Pattern]:
    """What the cuts say together: one pattern for each set of terms."""
    for result in results:
        if result.causes:
            raise Refuted(result.causes, result.pattern.losses)
    alike: dict[tuple[Term, ...], list[Pattern]] = {}
    for result in results:
        is_proved = result.pattern.is_proved and result.is_clear
        alike.setdefault(result.pattern.terms, []).append(replace(result.pattern, is_proved=is_proved))
    try:
        return [_merged(patterns) for patterns in alike.values()]
    except law.NoLaw as reason:
        raise Refuted([f"a term {reason}"], results[0].pattern.losses) from reason


def _merged(patterns: Sequence[Pattern]) -> Pattern:
    last = patterns[-1]
    laws = {term.key: law.common([pattern.law(term) for pattern in patterns]) for term in last.terms}
    return replace(last, laws=laws, uses_values=any(pattern.uses_values for pattern in patterns))


def _probe_once(rehearse: Rehearse, cut: Cut, weigh: Weigh, known_before: bool) -> _Result:
    whole = run_whole(rehearse, cut, weigh)
    if whole.refusals:
        return _Result(_by_rows(whole), whole.refusals)
    keeps = bool(whole.leaves)
    runs = [rehearse(cut.start, cut.middle, keeps=keeps), rehearse(cut.middle, cut.stop, keeps=keeps)]
    try:
        whole, halves, is_other_form = _see_halves(whole, runs)
    except OtherGraph as difference:
        cause = f"rows {cut.start} to {cut.stop} and their halves have different losses: {difference}"
        return _Result(_by_rows(whole), (cause,), is_clear=False)
    known, causes = learn(whole, halves, cut)
    is_clear = _shows_all(whole, halves, cut)
    if causes:
        says_nothing = is_other_form or (known_before and not whole.is_labelled)
        return _Result(known, causes, is_clear and not says_nothing)
    if not whole.seen.is_finite and not whole.not_comparable:
        return _Result(replace(known, is_proved=False), (), is_clear)
    doubt = whole.not_comparable and f"{whole.not_comparable}, so the pieces were not compared with the whole"
    if not doubt:
        given = [weigh(cut.start, cut.middle), weigh(cut.middle, cut.stop)]
        compared, causes = _compare(known, whole, halves, runs, given, cut)
        if not causes or _repeats_itself(rehearse, cut, whole):
            return _Result(compared, causes, is_clear)
        doubt = (
            "two runs on the same rows differ (random numbers of its own, or state?), so nothing was compared"
        )
    return _Result(replace(known, warnings=(*known.warnings, doubt)), (), is_clear)


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


def _repeats_itself(rehearse: Rehearse, cut: Cut, whole: Whole) -> bool:
    """Do two runs on the same rows give the same losses?"""
    again = rehearse(cut.start, cut.stop, keeps=False)
    values = [float(loss.detach().double()) for loss in again.losses]
    return all(
        abs(one - other) <= whole.allowed.slack(one, other)
        for one, other in zip(values, whole.seen.losses, strict=True)
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
        reading.weight and (term.kind is not Kind.OPAQUE or part != 0)
        for term, reading, part in zip(known, seen.readings, seen.parts, strict=True)
    )


def _by_rows(whole: Whole) -> Pattern:
    return weighted([Law.ROWS] * len(whole.given))


def _compare(
    known: Pattern,
    whole: Whole,
    halves: Sequence[Seen],
    runs: Sequence[Rehearsal],
    given: Sequence[Sequence[Given | None]],
    cut: Cut,
) -> tuple[Pattern, tuple[str, ...]]:
    """Scales the halves by the laws and compares them with the piece: values first, then gradients.

    Returns:
        The pattern, with the law of what is left beside its terms, and why it can't be.
    """
    pieces = [
        shares.weigh(known, half.readings, rows, amounts)
        for half, rows, amounts in zip(halves, cut.rows, given, strict=True)
    ]
    totals = shares.totals(pieces)
    factors = [shares.factors(piece, totals) for piece in pieces]
    try:
        plans = [
            scale.plans(known, half.readings, factor, len(pieces), is_final=True)
            for half, factor in zip(halves, factors, strict=True)
        ]
    except CannotScale as reason:
        return known, (str(reason),)
    trial = Trial(known, cut.rows, whole.seen, halves, factors, plans, whole.allowed)
    verdicts = [evidence.compare_values(trial, root) for root in range(known.losses)]
    causes = [verdict.cause for verdict in verdicts if verdict.cause]
    if not causes and whole.leaves:
        scaled = [
            evidence.gradients(run.losses, whole.leaves, plan) for run, plan in zip(runs, plans, strict=True)
        ]
        cause = evidence.compare_gradients(whole.gradients, scaled, whole.allowed)
        causes = [cause] if cause else []
    remainders = tuple(verdict.remainder for verdict in verdicts)
    return replace(known, remainders=remainders, uses_values=any(remainders)), tuple(causes)
