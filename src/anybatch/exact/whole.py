"""The piece that a probe looks at, run once: its terms, its numbers, and no graph.

Where its rows are is seen by comparing its graph with that of other rows, run for their graph alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from anybatch.exact import evidence, graph, labels, nodes, operations, terms
from anybatch.exact.cover import covering_leaves
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen
from anybatch.exact.reading import follow
from anybatch.exact.rehearsal import NoRoom, Rehearsal, Rehearse
from anybatch.exact.terms import Kind, Term
from anybatch.exact.values import must_be_recorded
from anybatch.exact.weights import Given

_LEAVES = 4

Weigh = Callable[[int, int], Sequence[Given | None]]
"""For each loss what the caller says of rows `start` to `stop`; None where the graph is to be read."""


@dataclass(frozen=True, eq=False)
class Whole:
    """What the piece showed, its graph gone.

    Attributes:
        terms: The terms of its losses.
        refusals: What its graph shows that no sum over pieces gives.
        given: For each loss what the caller says of it; None where the graph is read.
        seen: What it says of the terms.
        leaves: Leaves at which its gradient is compared.
        gradients: Its gradients at these leaves.
        allowed: How close is equal.
        not_comparable: Why its numbers say nothing about those of another run; None where they do.
        is_labelled: Are the terms those of a graph whose rows are known?
        scales_rows: Is something that has rows multiplied with one number that was computed?
        structure: What tells its graph from those of other forms.
        own_terms: The terms of each loss as far as its graph can be read without labels.
        own_seen: What the piece says of these.
        is_recorded: Are values of terms told by what was recorded? Its halves are recorded, too.
    """

    terms: tuple[Term, ...]
    refusals: tuple[str, ...]
    given: Sequence[Given | None]
    seen: Seen
    leaves: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    allowed: evidence.Tolerance
    not_comparable: str | None
    is_labelled: bool
    scales_rows: bool
    structure: int
    own_terms: tuple[Term, ...]
    own_seen: Seen
    is_recorded: bool


def _run_beside(rehearse: Rehearse, cut: Cut) -> tuple[Rehearsal, int]:
    start, stop = cut.beside
    try:
        return rehearse(start, stop, keeps=False, records=False), stop - start
    except NoRoom:
        return rehearse(cut.start, cut.middle, keeps=False, records=False), cut.rows[0]


def run_whole(rehearse: Rehearse, cut: Cut, weigh: Weigh) -> Whole:
    """Runs other rows for their graph alone, then the piece; keeps numbers only.

    Raises:
        NoRoom: Out of memory with more rows than a piece has.
    """
    small, small_rows = _run_beside(rehearse, cut)
    small_graph = graph.read(small.losses)
    # Large results that no backward is to free would stay beside those of the halves.
    compares = not (cut.is_wide or small.not_comparable or graph.has_reentrant_checkpoint(small_graph))

    def look(*, records: bool) -> tuple[Rehearsal, graph.Graph, terms.Findings]:
        run = rehearse(cut.start, cut.stop, keeps=compares, records=records)
        seen, given = graph.read(run.losses), weigh(cut.start, cut.stop)
        return run, seen, _find_terms(seen, sum(cut.rows), small_graph, small_rows, given)

    # Recording takes time. Whether it is needed is seen for sure on the labelled graph only.
    records = must_be_recorded(own_terms(small)) or _branches(small) or _may_clamp(small)
    large, large_graph, found = look(records=records)
    if not records and must_be_recorded(found.terms):
        del large, large_graph
        records = True
        large, large_graph, found = look(records=records)
    given = weigh(cut.start, cut.stop)
    seen = evidence.see(large, found.terms)
    leaves = _leaves_to_compare(large, large_graph, small_graph, seen) if compares else []
    own, structure = own_terms(large), graph.outline(large.losses).structure
    own_seen = evidence.see(large, own)
    with large.conditions():  # what is saved inside of a checkpoint is computed again
        scales_rows = bool(leaves) and any(map(_is_scaled_by_a_number, large_graph.nodes))
    gradients = evidence.gradients(large, leaves)  # last, for it frees the graph
    return Whole(
        terms=tuple(found.terms),
        refusals=tuple(found.refusals),
        given=given,
        seen=seen,
        leaves=leaves,
        gradients=gradients,
        allowed=evidence.tolerance(large_graph),
        not_comparable=large.not_comparable,
        is_labelled=found.is_labelled,
        scales_rows=scales_rows,
        structure=structure,
        own_terms=own,
        own_seen=own_seen,
        is_recorded=records,
    )


def _leaves_to_compare(
    run: Rehearsal, large: graph.Graph, small: graph.Graph, seen: Seen
) -> list[torch.Tensor]:
    """The leaves at which gradients of the piece and its halves are compared.

    Those nearest to each term, where gradients are large, and some that see all of the way down.
    """
    if run.not_comparable:
        return []
    # Leaves that the function makes itself are others in each run.
    lasting = {id(leaf) for leaf in small.leaves()} - run.inputs
    ends = {reading.end for reading in seen.readings}
    places = [place for place, node in enumerate(large.nodes) if node in ends]

    def accept(leaf: torch.Tensor) -> bool:
        return id(leaf) in lasting

    near = graph.nearest_leaves(large, places, _LEAVES, accept)
    return list({id(leaf): leaf for leaf in (*near, *covering_leaves(large, accept))}.values())


def _find_terms(
    large: graph.Graph, large_rows: int, small: graph.Graph, small_rows: int, given: Sequence[Given | None]
) -> terms.Findings:
    """The terms of the losses; a loss with a weight of its own, or an unlike graph, is one opaque term."""
    unread = [index for index, one in enumerate(given) if one is None]
    labelled = labels.label(large, large_rows, small, small_rows) if unread else None
    if labelled is None:
        tops = [None if one else large.nodes[top] for one, top in zip(given, large.roots, strict=True)]
        known = [terms.unlabelled(index, top) for index, top in enumerate(tops)]
        return terms.Findings(known, is_labelled=not unread)
    found = terms.find(labelled, unread)
    found.terms += [terms.unlabelled(index) for index, one in enumerate(given) if one is not None]
    found.refusals += labelled.couplings
    return found


def _branches(run: Rehearsal) -> bool:
    """Does the way down from a loss branch before anything that is read there?"""
    return any(term.kind is Kind.OPAQUE for term in own_terms(run))


def _is_scaled_by_a_number(node: Node) -> bool:
    """Is a result of more than one number multiplied with, or divided by, one that is no number of Python's?

    These are saved in the widest dtype, so that none is taken for one where the result has less.
    """
    name, inputs = node.name(), terms.needed([child for child, _ in node.next_functions])
    if name not in operations.SCALING or sum(inputs) != 1 or len(graph.shapes(node)[0]) == 0:
        return False
    try:
        constant = nodes.constant(node, name, inputs.index(True))
    except nodes.Unreadable:
        return False
    value = constant.value if constant else None
    return (
        isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == node._input_metadata[0].dtype
    )


def _may_clamp(run: Rehearsal) -> bool:
    """Is a loss divided by a number that may be a clamped count?"""
    return any(
        follow(term, graph.node_of(loss)).may_clamp
        for term, loss in zip(own_terms(run), run.losses, strict=True)
    )


def own_terms(run: Rehearsal) -> tuple[Term, ...]:
    """One term for each loss, as far as its graph can be read without labels."""
    return tuple(terms.unlabelled(index, graph.node_of(loss)) for index, loss in enumerate(run.losses))
