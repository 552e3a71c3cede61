"""Learning the pattern of a function's losses: when to probe, on which rows, and what a refusal means."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from anybatch._rehearse import Rehearser
from anybatch._run import Bound
from anybatch._settings import Settings
from anybatch.batch import Layout
from anybatch.errors import InexactError, InexactWarning
from anybatch.exact.cuts import spread, straddle, wide
from anybatch.exact.graph import Outline
from anybatch.exact.law import Law
from anybatch.exact.pattern import Known, weighted
from anybatch.exact.probe import Refuted, probe
from anybatch.exact.weights import BatchWeights, Given
from anybatch.fit.transaction import Transaction

_MOST_PROBES = 8


@dataclass(eq=False)
class Learner:
    """Fills the memory of one kind of call."""

    bound: Bound
    layout: Layout
    settings: Settings
    weights: BatchWeights
    memory: Known
    transaction: Callable[[], Transaction]
    device: torch.device | None

    def learn(self, sizes: Sequence[int], index: int, straddles: bool = False) -> None:
        """Probes the function, on the piece of the given index first.

        Args:
            sizes: The rows of each piece.
            index: The piece.
            straddles: Probe across the border to the piece before it: the two differ in what they divide by.

        Raises:
            InexactError: The loss does not add up, and the caller wants to hear of it as an error.
        """
        if self.settings.on_inexact == "ignore":
            return
        self.memory.probes += 1
        most_rows = max(sizes)
        rehearser = Rehearser(self.bound, self.layout, self.device, most_rows, self.transaction)
        cuts = straddle(sizes, index) if straddles else spread(sizes, index)
        first = wide(sizes[index], sum(sizes))
        if first is not None and not self.memory.patterns:
            cuts.insert(0, first)

        def weigh(start: int, stop: int) -> list[Given | None]:
            return self.weights.given(rehearser.names, start, stop)

        try:
            found = probe(rehearser, cuts, weigh, self.memory.patterns)
        except Refuted as refuted:
            self.refuse(refuted.causes, refuted.losses)
        else:
            self.memory.has_no_room = not found and not self.memory.patterns
            if found:
                self.memory.patterns = [known for known in self.memory.patterns if known.is_proved]
            for pattern in found:
                notes = (*pattern.warnings, *rehearser.notes)
                self.memory.add(replace(pattern, warnings=notes))

    def is_tired(self) -> bool:
        """Has the function been probed so often that once more is not worth it?"""
        return self.memory.probes >= _MOST_PROBES

    def is_new(self, seen: Outline) -> bool:
        """Is this a graph on which nothing has been proved yet? Takes note of it."""
        if self.settings.on_inexact == "ignore":
            return False
        if seen.structure in self.memory.structures:
            return False
        is_first = not self.memory.structures
        self.memory.structures.add(seen.structure)
        has_fixed_graph = all(pattern.has_fixed_graph for pattern in self.memory.patterns)
        return has_fixed_graph and not is_first and not self.is_tired()

    def refuse(self, causes: Sequence[str], losses: int) -> None:
        """Says that the losses don't add up; where the caller accepts that, they count by rows.

        Raises:
            InexactError: The caller does not.
        """
        message = (
            "`apply`: the micro-batches can't give the gradient of the whole mini-batch. "
            f"Got from {self.bound.name}: {'; '.join(causes)}. {_advice(causes)}"
        )
        if self.settings.on_inexact == "raise":
            raise InexactError(message, tuple(causes))
        if self.settings.on_inexact == "warn":
            warnings.warn(message, InexactWarning, stacklevel=2)
        self.memory.patterns = [weighted([Law.ROWS] * losses)]


def _advice(causes: Sequence[str]) -> str:
    # A loss that adds up, but term by term, is made no sum by `weight=`: its cause has the way out.
    if all(cause.endswith("dict of losses") for cause in causes):
        return 'Or accept the difference with `on_inexact="warn"`.'
    return (
        "Make it a sum or mean over rows, say with `weight=` what it is divided by, or accept the difference "
        'with `on_inexact="warn"`.'
    )
