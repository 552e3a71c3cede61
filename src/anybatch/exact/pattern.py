"""What is known about the loss of a function: its terms, their laws, and how far that is proved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node

from anybatch.exact.graph import node_of
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.reading import OtherGraph, Reading, follow
from anybatch.exact.terms import Key, Term, unlabelled


@dataclass(frozen=True, eq=False)
class Pattern:
    """The loss of a function as one probe, or the caller's weights, explain it.

    Attributes:
        terms: The terms of its losses.
        laws: The law of each term, by the term's key.
        remainders: For each loss the law of what is left when the terms are taken away; None where
            nothing is left, or where the terms' own factors fit it.
        uses_values: Must the terms' values be known to tell the value of the whole loss?
        warnings: What could not be proved.
        has_fixed_graph: Is the graph the same for every number of rows?
        is_proved: Was there anything to compare? Not where a loss was nan.
        uses_counts: Is a number by which it is divided a clamp of a count, or one that Python has read?
        is_linear: Does half a loss have half its gradient? Not where a hook clips gradients on their way.
    """

    terms: tuple[Term, ...]
    laws: Mapping[Key, TermLaw]
    remainders: tuple[Law | None, ...]
    uses_values: bool = False
    warnings: tuple[str, ...] = ()
    has_fixed_graph: bool = True
    is_proved: bool = True
    is_linear: bool = True
    uses_counts: bool = False

    def law(self, term: Term) -> TermLaw:
        """The law of one of its terms."""
        return self.laws[term.key]

    @property
    def losses(self) -> int:
        """The number of losses."""
        return len(self.remainders)

    def read(self, losses: Sequence[torch.Tensor]) -> list[Reading]:
        """Reads every term on the losses of a piece.

        Raises:
            OtherGraph: The piece has other terms.
        """
        if len(losses) != self.losses:
            raise OtherGraph(f"{len(losses)} losses instead of {self.losses}")
        tops: list[Node] = [node_of(loss) for loss in losses]
        return [follow(term, tops[term.root]) for term in self.terms]


def weighted(laws: Sequence[Law]) -> Pattern:
    """The pattern of losses that are each taken as one opaque term, under the given laws."""
    terms = tuple(unlabelled(index) for index in range(len(laws)))
    known = {term.key: TermLaw(law) for term, law in zip(terms, laws, strict=True)}
    return Pattern(terms, known, (None,) * len(laws), has_fixed_graph=False)


@dataclass
class Known:
    """What is known about one kind of call of a function.

    Attributes:
        patterns: More than one where pieces differ in their terms.
        structures: The graphs of first pieces that are known to carry a proved pattern.
        needs_counting: Did a call need the denominators of all pieces before its first backward?
        needs_values: Did it need the values of terms?
        needs_counts: Did it need to see what counts were before they were clamped?
        closes_graph: Did a compiler close the graph of a loss whose terms must be told apart?
        keeps_results: Must a forward run keep its results, for gradients inside of the function?
        runs_plainly: Does the function run only without a graph while gradients are disabled?
        has_no_room: Did a probe of two rows run out of memory?
        has_bare_leaves: Are there leaves that belong to no module?
        was_watched: Were all modules watched that ran in a call?
        has_strays: Did a module run that nothing in reach leads to?
        is_single: Does the graph compute in float32 and nothing coarser? None before that was looked at.
        probes: How often the function was probed.
        compared: The pairs of patterns of which pieces were looked at together.
    """

    patterns: list[Pattern] = field(default_factory=list)
    structures: set[int] = field(default_factory=set)
    needs_counting: bool = False
    needs_values: bool = False
    needs_counts: bool = False
    closes_graph: bool = False
    keeps_results: bool = False
    runs_plainly: bool = False
    has_no_room: bool = False
    has_bare_leaves: bool = False
    was_watched: bool = False
    has_strays: bool = False
    is_single: bool | None = None
    probes: int = 0
    compared: set[frozenset[tuple[Term, ...]]] = field(default_factory=set)

    @property
    def is_proved(self) -> bool:
        """Is something known, and known from rows that showed all of it?"""
        return bool(self.patterns) and all(pattern.is_proved for pattern in self.patterns)

    def add(self, pattern: Pattern) -> None:
        """Takes a pattern in; one with the same terms is replaced."""
        self.patterns = [known for known in self.patterns if known.terms != pattern.terms]
        self.patterns.append(pattern)
        self.needs_values = self.needs_values or pattern.uses_values
        self.needs_counts = self.needs_counts or pattern.uses_counts

    def match(self, losses: Sequence[torch.Tensor]) -> tuple[Pattern, list[Reading]] | None:
        """The pattern that explains the losses of a piece, with its readings."""
        for pattern in self.patterns:
            try:
                return pattern, pattern.read(losses)
            except OtherGraph:
                continue
        return None
