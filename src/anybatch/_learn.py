"""Learning the pattern of a function's losses: when to probe, on which rows, and what a refusal means."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Module

from anybatch._rehearse import Rehearser
from anybatch._run import Bound
from anybatch._settings import Settings
from anybatch.batch import Layout
from anybatch.errors import InexactError, InexactWarning
from anybatch.exact.graph import Graph
from anybatch.exact.law import Law
from anybatch.exact.pattern import Given, Memory, Pattern, weighted
from anybatch.exact.probe import Cut, Refuted, halve, probe

_MOST_CUTS = 8
_MOST_PROBES = 8


@dataclass(eq=False)
class Learner:
    """Fills the memory of one kind of call."""

    bound: Bound
    layout: Layout
    settings: Settings
    memory: Memory
    modules: Sequence[Module]
    device: torch.device | None

    def learn(self, sizes: Sequence[int], index: int) -> None:
        """Probes the function, on the piece of the given index first.

        Raises:
            InexactError: The loss does not add up, and the caller wants to hear of it as an error.
        """
        if self.settings.on_inexact == "ignore":
            return
        self.memory.probes += 1
        rehearser = Rehearser(self.bound, self.layout, self.device, self.modules)
        try:
            found = probe(
                rehearser, _cuts(sizes, index), lambda start, stop: self._given(rehearser, start, stop)
            )
        except Refuted as refuted:
            found = self._refused(refuted)
        self.memory.add(found)

    def _given(self, rehearser: Rehearser, start: int, stop: int) -> list[Given | None]:
        return self.settings.weights.given(rehearser.names, start, stop, self.layout.cut)

    def is_new(self, seen: Graph) -> bool:
        """Is this a graph on which nothing has been proved yet? Takes note of it."""
        if self.settings.on_inexact == "ignore":
            return False
        if seen.structure in self.memory.structures:
            return False
        is_first = not self.memory.structures
        self.memory.structures.add(seen.structure)
        has_fixed_graph = all(pattern.has_fixed_graph for pattern in self.memory.patterns)
        return has_fixed_graph and not is_first and self.memory.probes < _MOST_PROBES

    def _refused(self, refuted: Refuted) -> Pattern:
        message = (
            "`apply`: the micro-batches can't give the gradient of the whole mini-batch. "
            f"Got from {self.bound.name}: {'; '.join(refuted.causes)}. Make it a sum or mean over rows, "
            'say with `weight=` what it is divided by, or accept the difference with `on_inexact="warn"`.'
        )
        if self.settings.on_inexact == "raise":
            raise InexactError(message, refuted.causes)
        warnings.warn(message, InexactWarning, stacklevel=6)
        return weighted([Law.ROWS] * refuted.losses)


def _cuts(sizes: Sequence[int], index: int) -> list[Cut]:
    """The pieces to probe on: the one of the given index, then others, spread over the mini-batch."""
    count = len(sizes)
    starts = [sum(sizes[:place]) for place in range(count)]
    spread = [(index + step * count // _MOST_CUTS) % count for step in range(_MOST_CUTS)]
    return [halve(starts[place], sizes[place], sum(sizes)) for place in dict.fromkeys([*spread, count - 1])]
