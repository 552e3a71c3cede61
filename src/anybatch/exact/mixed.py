"""Rows of different forms beside each other: a loss that has other terms where nothing is to be counted.

    if not mask.any():
        return output.sum() * 0

A piece with labels and one without can't be halved within their forms. But together they have the form of
one of them, and show what the rows of the other add to its terms. The same trial tells such a function from
one that is switched by its own value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anybatch.exact import evidence, graph, labels, law, nodes, shares, terms
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen
from anybatch.exact.labels import pretty
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.pattern import Known, Pattern
from anybatch.exact.reading import OtherGraph, Reading
from anybatch.exact.rehearsal import Rehearsal
from anybatch.exact.terms import Kind, Term
from anybatch.exact.total import PieceLosses, total
from anybatch.exact.weights import Given

_UNLABELLED = (
    "the loss has another form where rows have nothing to count, and no rows were found that show whether "
    "those that count are coupled in it"
)


@dataclass(frozen=True, eq=False)
class Form:
    """A run with the pattern that explains it, and what it says of its terms."""

    run: Rehearsal
    pattern: Pattern
    seen: Seen


def known_form(run: Rehearsal, known: Sequence[Pattern]) -> Form | None:
    """The run explained by one of some patterns."""
    matched = Known(list(known)).match(run.losses)
    return Form(run, matched[0], evidence.see(run, matched[0].terms)) if matched else None


def new_form(
    whole: Rehearsal, halves: Sequence[Rehearsal], known: Sequence[Pattern], cut: Cut
) -> Form | None:
    """The form of a piece that only one of its halves has; the other has a known one.

    Raises:
        NoLaw: The rows of the other form change what it divides by, or its rows are coupled.
    """
    seen = graph.read(whole.losses)
    graphs = [graph.read(half.losses) for half in halves]
    alike = [place for place, one in enumerate(graphs) if seen.is_like(one)]
    others = [known_form(half, known) for place, half in enumerate(halves) if place not in alike]
    if len(alike) != 1 or others[0] is None:
        return None
    (mine,) = alike
    found, notes = _terms(whole, labels.label(seen, sum(cut.rows), graphs[mine], cut.rows[mine]))
    if any(term.kind is Kind.OPAQUE for term in found):
        return None
    try:
        pair = evidence.see(whole, found), evidence.see(halves[mine], found)
    except OtherGraph:
        return None
    pattern = _learn(found, pair, others[0], cut, mine, evidence.tolerance(seen))
    return Form(whole, replace(pattern, warnings=(*notes, *pattern.warnings)), pair[0])


def _terms(whole: Rehearsal, labelled: labels.Labelled | None) -> tuple[Sequence[Term], tuple[str, ...]]:
    """Its terms, by labels where these show rows: a mask may let as many through in the one as in the other.

    Returns:
        The terms, and what could not be looked for.
    """
    losses = range(len(whole.losses))
    found = terms.find(labelled, losses) if labelled else terms.Findings()
    if {term.root for term in found.terms if term.kind is not Kind.PARAMETERS} != set(losses):
        own = [terms.unlabelled(index, graph.node_of(whole.losses[index])) for index in losses]
        return own, (_UNLABELLED,)
    couplings = labelled.couplings if labelled else ()
    if found.refusals or couplings:
        raise law.NoLaw("; ".join((*found.refusals, *couplings)))
    return found.terms, ()


def _learn(
    found: Sequence[Term],
    pair: tuple[Seen, Seen],
    other: Form,
    cut: Cut,
    mine: int,
    allowed: evidence.Tolerance,
) -> Pattern:
    beside = {
        term.key: reading for term, reading in zip(other.pattern.terms, other.seen.readings, strict=True)
    }
    laws: dict[terms.Key, TermLaw] = {}
    notes: list[str] = []
    for term, whole, half in zip(found, pair[0].readings, pair[1].readings, strict=True):
        if term.kind is Kind.PARAMETERS:
            laws[term.key] = law.of_constants(whole, [half], [cut.rows[mine]])
        elif term.key in beside:
            halves = [half, beside[term.key]][:: 1 if mine == 0 else -1]
            laws[term.key] = law.of_denominators(whole, halves, cut.rows, allowed.absolute)
        else:
            laws[term.key] = _law_of_one(term, whole, half, cut.rows[mine], notes)
    return Pattern(tuple(found), laws, (None,) * len(pair[0].losses), warnings=tuple(notes))


def _law_of_one(term: Term, whole: Reading, half: Reading, rows: int, notes: list[str]) -> TermLaw:
    """The law of a term that only one half has: the rows of the other may not change what it divides by."""
    if abs(whole.denominator - half.denominator) > 1e-6 * abs(whole.denominator):
        raise law.NoLaw(
            f"{pretty(term.end)} divides by {half.denominator:g} in {rows} rows and by {whole.denominator:g} "
            "together with rows whose loss does not have it"
        )
    if not nodes.is_sum(half.end, term.end):
        return TermLaw(Law.MEAN, per_row=half.denominator / rows)
    if not any(constant.divides for constant in half.scalars):
        return TermLaw(Law.SUM, constant=half.denominator)
    notes.append(
        f"{pretty(term.end)} is not there for all rows, and on some what it is divided by could not be told "
        "from a constant; it is taken for a count. Say with `weight=` what counts"
    )
    return TermLaw(Law.MEAN, per_row=half.denominator / rows)


def disagreement(
    whole: Rehearsal, halves: Sequence[Form], given: Sequence[Sequence[Given | None]], cut: Cut
) -> str | None:
    """Do the losses of two halves of different forms combine to that of both? Where not, says so."""
    pieces = [
        shares.weigh(form.pattern, form.seen.readings, rows, said)
        for form, rows, said in zip(halves, cut.rows, given, strict=True)
    ]
    totals = shares.totals(pieces)
    kept = []
    for piece, form in zip(pieces, halves, strict=True):
        factors = shares.factors(piece, totals)
        commons = shares.commons(piece, factors, len(halves))
        if None in form.seen.parts and (None in commons or form.pattern.uses_values):
            return None
        kept.append(PieceLosses.of(form.run.losses, commons, piece, factors, form.seen.parts))
    allowed = evidence.tolerance(graph.read(whole.losses))
    combined = [float(value) for value in total(kept, sum(cut.rows), 1.0, torch.float64)]
    for root, (value, loss) in enumerate(zip(combined, whole.losses, strict=True)):
        expected = float(loss.detach().double())
        parts = [form.seen.losses[root] for form in halves]
        if abs(value - expected) > allowed.slack(expected, *parts):
            return (
                "pieces have losses of different forms that do not combine: "
                f"{parts[0]:.8g} and {parts[1]:.8g} for {cut.rows[0]} and {cut.rows[1]} rows, "
                f"{expected:.8g} for all of them (a loss that is switched by its own value?)"
            )
    return None
