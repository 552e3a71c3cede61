"""The terms of a loss for those who want no probe: taken for what one graph alone looks like.

Nothing is proved here. Where rows are is guessed from dims that are multiples of the piece's rows, and a
constant that divides a sum is taken for a count.
"""

import math
from collections.abc import Sequence

from torch.autograd.graph import Node

from anybatch.exact import nodes, terms
from anybatch.exact.graph import Graph, shapes
from anybatch.exact.labels import Label, Labelled, label_without_rows
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.nodes import Constant
from anybatch.exact.pattern import Pattern
from anybatch.exact.reading import follow
from anybatch.exact.terms import Kind, Term
from anybatch.exact.weights import Given


def guess(graph: Graph, rows: int, given: Sequence[Given | None]) -> Pattern:
    """The pattern that the graph of one piece looks like.

    Args:
        graph: Of the piece's losses.
        rows: The number of rows of the piece.
        given: For each loss what the caller says of it; None where it is to be guessed.
    """
    unread = [index for index, one in enumerate(given) if one is None]
    found = terms.find(Labelled(graph, _labels(graph, rows), ()), unread)
    refused = set(unread) if found.refusals else set()
    known = [term for term in found.terms if term.root not in refused]
    known += [
        terms.unlabelled(index) for index, one in enumerate(given) if one is not None or index in refused
    ]
    tops = [graph.nodes[root] for root in graph.roots]
    laws = {term.key: _law(term, tops[term.root], given[term.root], rows) for term in known}
    return Pattern(tuple(known), laws, (None,) * len(given))


def _labels(graph: Graph, rows: int) -> list[Label]:
    labels: list[Label] = []
    for place, node in enumerate(graph.nodes):
        has_rows = any(dim % rows == 0 for shape in shapes(node) for dim in shape)
        labels.append(Label.ROWS if has_rows else label_without_rows(graph, place, labels))
    return labels


def _law(term: Term, root: Node, given: Given | None, rows: int) -> TermLaw:
    if given is not None:
        return TermLaw(given.law)
    if term.kind is Kind.PARAMETERS:
        return TermLaw(Law.ONCE)
    if term.kind is Kind.OPAQUE:
        return TermLaw(Law.ROWS)
    reading = follow(term, root)
    if nodes.is_sum(reading.end, term.end) and not any(
        _may_be_a_count(one, reading.end, rows) for one in reading.scalars
    ):
        return TermLaw(Law.SUM)
    return TermLaw(Law.MEAN)


def _may_be_a_count(constant: Constant, end: Node, rows: int) -> bool:
    """Does a sum divide by no more than the elements that it has, or multiply with one over its rows?"""
    value = abs(float(constant.value))
    if not constant.divides:
        return rows > 1 and 0 < value < 1 and math.isclose(1 / value % rows, 0, abs_tol=1e-9)
    sizes = getattr(end, "_saved_self_sym_sizes", None)
    return value > 1 and (sizes is None or value <= math.prod(sizes))
