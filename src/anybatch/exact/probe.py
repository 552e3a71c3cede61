"""The probe: a piece and its two halves, forward, to learn a loss's laws and to try to refute them.

The graph shows what a loss divides by. It can't show what came in through constants: advantages
normalised over the batch, targets centred, rows mixed with each other. So the probe also computes: the
halves, scaled by the laws, must give the loss of the piece, and its gradient at leaves that see all of the
way down (`evidence.py`, `cover.py`). That can refute a law; it can't prove one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anybatch.exact import law
from anybatch.exact.cuts import Cut
from anybatch.exact.examination import Result, examine
from anybatch.exact.law import Law
from anybatch.exact.pattern import Pattern
from anybatch.exact.rehearsal import NoRoom, Rehearse
from anybatch.exact.terms import Kind, Term
from anybatch.exact.whole import Weigh

_CONFIRMATIONS = 3


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
    found: list[Result] = []
    for cut in cuts:
        try:
            before = [*known, *(result.pattern for result in found if result.is_clear)]
            result = examine(rehearse, cut, weigh, before)
            found.append(
                replace(result, is_wide=cut.is_wide, is_clear=result.is_clear and _adds(result, found))
            )
        except NoRoom:
            continue
        except Exception:  # any error: some functions don't run on so few rows
            if not any(result.is_clear for result in found):
                raise
            break
        if any(result.causes for result in found if result.is_clear):
            break
        if any(result.ends_search(known) for result in found) and not _needs_another(found):
            break
    clear = [result for result in found if result.is_clear]
    patterns = _verdict(clear or found) if clear or not known else known
    taught = [_taught(pattern, found) for pattern in patterns]
    return taught if clear or not known else [one for one in taught if one not in known]


def _taught(pattern: Pattern, found: Sequence[Result]) -> Pattern:
    """The pattern, with what cuts have shown of rows of which nothing counts: such prove nothing else."""
    laws = dict(pattern.laws)
    for key, known in pattern.laws.items():
        said = [learnt.counts_all for result in found if (learnt := result.pattern.laws.get(key))]
        if known.law is Law.MEAN:
            laws[key] = replace(known, counts_all=law.counting([known.counts_all, *said]))
    return pattern if laws == pattern.laws else replace(pattern, laws=laws)


def _adds(result: Result, found: Sequence[Result]) -> bool:
    """Does it confirm others, refute them, or read what they have not?"""
    clear = [other.pattern.terms for other in found if other.is_clear]
    is_read = all(term.kind is not Kind.OPAQUE for term in result.pattern.terms)
    return not clear or is_read or bool(result.causes) or result.pattern.terms in clear


def _needs_another(found: Sequence[Result]) -> bool:
    """Does a term divide by more than its rows, such as a count, and few other cuts have confirmed it yet?

    What selects rows by their values, or counts a part of them, may by chance add up on some cuts. And a
    number that scales what rows have may by chance be the same on some.
    """
    clear = [result for result in found if result.is_clear]
    tried = len(found) - found.index(clear[0])
    if 0 < sum(result.scales_rows for result in clear) <= _CONFIRMATIONS + 1:
        return True
    if tried <= _CONFIRMATIONS and not all(result.pattern.has_fixed_graph for result in clear):
        return clear[0].is_compared
    return tried <= _CONFIRMATIONS and any(
        known.c0 or (known.law is Law.MEAN and not known.follows_rows and clear[0].is_compared)
        for result in clear
        for known in result.pattern.laws.values()
    )


def _verdict(results: Sequence[Result]) -> list[Pattern]:
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
    return replace(
        last,
        laws=laws,
        uses_values=any(pattern.uses_values for pattern in patterns),
        warnings=tuple(note for note in last.warnings if all(note in one.warnings for one in patterns)),
        is_linear=all(pattern.is_linear for pattern in patterns),
        uses_counts=any(pattern.uses_counts for pattern in patterns),
    )
