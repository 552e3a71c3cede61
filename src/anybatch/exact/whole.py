"""The piece that a probe looks at, run once: its terms, its numbers, and no graph.

Where its rows are is seen by comparing its graph with that of other rows, run for their graph alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anybatch.exact import evidence, graph, labels, terms
from anybatch.exact.cuts import Cut
from anybatch.exact.evidence import Seen
from anybatch.exact.rehearsal import NoRoom, Rehearsal, Rehearse
from anybatch.exact.terms import Term
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
        leaves: Leaves near its terms.
        gradients: Its gradients at these leaves.
        allowed: How close is equal.
        not_comparable: Why its numbers say nothing about those of another run; None where they do.
        is_labelled: Are the terms those of a graph whose rows are known?
        own_terms: The terms of each loss as far as its graph can be read without labels.
        own_seen: What the piece says of these.
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
    own_terms: tuple[Term, ...]
    own_seen: Seen


def _run_beside(rehearse: Rehearse, cut: Cut) -> tuple[Rehearsal, int]:
    start, stop = cut.beside
    try:
        return rehearse(start, stop, keeps=False), stop - start
    except NoRoom:
        return rehearse(cut.start, cut.middle, keeps=False), cut.rows[0]


def run_whole(rehearse: Rehearse, cut: Cut, weigh: Weigh) -> Whole:
    """Runs other rows for their graph alone, then the piece; keeps numbers only.

    Raises:
        NoRoom: Out of memory with more rows than a piece has.
    """
    small, small_rows = _run_beside(rehearse, cut)
    small_graph = graph.read(small.losses)
    # Large results that no backward is to free would stay beside those of the halves.
    compares = not (cut.is_wide or small.not_comparable or graph.has_reentrant_checkpoint(small_graph))
    large = rehearse(cut.start, cut.stop, keeps=compares)
    large_graph = graph.read(large.losses)
    given = weigh(cut.start, cut.stop)
    found = _find_terms(large_graph, sum(cut.rows), small_graph, small_rows, given)
    seen = evidence.see(large, found.terms)
    leaves = _leaves_to_compare(large, large_graph, small_graph, seen) if compares else []
    own = own_terms(large)
    own_seen = evidence.see(large, own)
    gradients = evidence.gradients(large.losses, leaves, None)  # last, for it frees the graph
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
        own_terms=own,
        own_seen=own_seen,
    )


def _leaves_to_compare(
    run: Rehearsal, large: graph.Graph, small: graph.Graph, seen: Seen
) -> list[torch.Tensor]:
    """The leaves nearest to each term at which gradients of the piece and its halves can be compared."""
    if run.not_comparable:
        return []
    # Leaves that the function makes itself are others in each run.
    lasting = {id(leaf) for leaf in small.leaves()} - run.inputs
    ends = {reading.end for reading in seen.readings}
    places = [place for place, node in enumerate(large.nodes) if node in ends]
    return graph.nearest_leaves(large, places, _LEAVES, lambda leaf: id(leaf) in lasting)


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


def own_terms(run: Rehearsal) -> tuple[Term, ...]:
    """One term for each loss, as far as its graph can be read without labels."""
    return tuple(terms.unlabelled(index, graph.node_of(loss)) for index, loss in enumerate(run.losses))
