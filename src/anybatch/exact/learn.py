"""The laws of a loss's terms, from what a piece and its halves showed."""

from collections.abc import Iterable, Sequence

from torch.autograd.graph import Node

from anybatch.exact import law, nodes
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen
from anybatch.exact.graph import name_of, shapes
from anybatch.exact.labels import pretty
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import Reading
from anybatch.exact.terms import Key, Kind
from anybatch.exact.whole import Whole


class Mislabelled(Exception):
    """What was taken for parameters alone is another for other rows, of which as many passed a mask."""


def learn(whole: Whole, halves: Sequence[Seen], cut: Cut) -> tuple[Pattern, tuple[str, ...]]:
    """The law of each term, and why there is none where there is none.

    Raises:
        Mislabelled: A term that has no rows by its labels has some.
    """
    laws: dict[Key, TermLaw] = {}
    causes: list[str] = []
    notes: list[str] = []
    for place, term in enumerate(whole.terms):
        given = whole.given[term.root]
        try:
            laws[term.key] = TermLaw(given.law) if given else _law_of(whole, halves, cut, place, notes)
        except law.NoLaw as reason:
            causes.append(f"{pretty(term.end) or 'the loss'} {reason}")
    if not whole.is_labelled:
        notes.append(
            "the loss has another graph for another number of rows, so what couples rows was not looked for "
            "in it; its values and gradients on some rows fit those on their halves"
        )
    has_fixed_graph = whole.is_labelled and all(term.end for term in whole.terms)
    remainders = (None,) * len(whole.given)
    uses_counts = any(
        reading.counted is not None for seen in (whole.seen, *halves) for reading in seen.readings
    )
    known = Pattern(
        whole.terms,
        laws,
        remainders,
        warnings=tuple(dict.fromkeys(notes)),
        has_fixed_graph=has_fixed_graph,
        uses_counts=uses_counts,
    )
    return known, tuple(dict.fromkeys(causes))


def _law_of(whole: Whole, halves: Sequence[Seen], cut: Cut, place: int, notes: list[str]) -> TermLaw:
    term, reading = whole.terms[place], whole.seen.readings[place]
    others = [half.readings[place] for half in halves]
    if term.kind is Kind.ROWS:
        return law.of_denominators(reading, others, cut.rows, whole.allowed.absolute)
    parts = [seen.parts[place] for seen in (whole.seen, *halves)]
    known = [part for part in parts if part is not None]
    if term.kind is Kind.PARAMETERS:
        if any(len(other.vectors) != len(reading.vectors) for other in others):
            raise Mislabelled
        moves = any(abs(part - known[0]) > whole.allowed.slack(part, known[0]) for part in known)
        below = _below(reading.end)
        may_be_rows = moves and not whole.not_comparable and _may_sum_rows(map(name_of, below))
        if any(0 in shape for node in below for shape in shapes(node)):
            raise Mislabelled  # parameters have elements: it is rows, none of which came through a selection
        try:
            found = law.of_constants(reading, others, cut.rows)
        except law.NoLaw as reason:
            if may_be_rows:
                raise Mislabelled from reason
            raise
        if may_be_rows and not _obeys(found.law, known, cut, whole):
            raise Mislabelled
        return found
    name = pretty(term.end) or "the loss"
    if whole.not_comparable or len(known) < len(parts):
        notes.append(f"{name} can't be read from its graph and is taken for a mean over rows")
        return TermLaw(Law.ROWS)
    slack = whole.allowed.slack(*known)
    by_constants = _law_of_constants(reading, others, cut, known, slack) if term.path else None
    if by_constants is not None:
        notes.append(f"{name} can't be read from its graph; its halves fit the constants that divide it")
        return by_constants
    by_values = law.of_values(known[0], known[1:], cut.rows, slack)
    if by_values is None:
        raise law.NoLaw(
            "can't be read from its graph, and combines neither like a mean over rows nor like a sum: "
            f"{known[1]:.8g} and {known[2]:.8g} for {cut.rows[0]} and {cut.rows[1]} rows, "
            f"{known[0]:.8g} for both together"
        )
    kind = "a mean over rows" if by_values is Law.ROWS else "a sum"
    notes.append(f"{name} can't be read from its graph; it was found to combine like {kind}")
    return TermLaw(by_values)


def _below(top: Node) -> set[Node]:
    """A node, and all below it."""
    seen: set[Node] = set()
    waiting: list[Node | None] = [top]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [child for child, _ in node.next_functions]
    return seen


def _may_sum_rows(names: Iterable[str]) -> bool:
    """Is there a sum that may be one of rows, of which as many came through a selection?"""
    return any(name.startswith(("Sum", "Mean")) or name in nodes.LOSSES for name in names)


def _obeys(found: Law, values: Sequence[float], cut: Cut, whole: Whole) -> bool:
    """Do the values of a term, of the piece and its halves, obey its law?"""
    if len(values) < 3 or found is Law.ONCE:
        return False
    shares = [1.0 if found is Law.SUM else rows / sum(cut.rows) for rows in cut.rows]
    combined = sum(share * value for share, value in zip(shares, values[1:], strict=True))
    return abs(combined - values[0]) <= whole.allowed.slack(*values)


def _law_of_constants(
    reading: Reading, others: Sequence[Reading], cut: Cut, values: Sequence[float], slack: float
) -> TermLaw | None:
    """The law that the constants on the way to an unreadable term suggest, where its values obey it."""
    try:
        found = law.of_denominators(reading, others, cut.rows, slack)
    except law.NoLaw:
        return None
    if found.law is not Law.MEAN or not reading.weight:
        return None
    combined = sum(
        other.weight / reading.weight * value for other, value in zip(others, values[1:], strict=True)
    )
    return found if abs(combined - values[0]) <= slack else None
