"""The memory of one run, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

__all__ = ["BEGIN", "Lifetime", "Trace"]

BEGIN = "begin"


class Lifetime(NamedTuple):
    """One storage: alive at the events from `born` up to, and without, `died`.

    Attributes:
        born: Index of the event that made it.
        died: Index of the first event without it; past the number of events where it is still alive.
        amount_bytes: Its size.
        holder: Whose it is.
    """

    born: int
    died: int
    amount_bytes: int
    holder: str


@final
@dataclass(frozen=True, eq=False)
class Trace:
    """What is alive at each event of a run. The first event is the begin, every other one an operator.

    Attributes:
        operators: Name of each event's operator, `aten::mm.default` for example.
        live_bytes: Bytes alive at each event, int64.
        phases: What the program was doing at each event; empty where nobody said.
        labels: Where in the program each event is; empty where nobody said.
        lifetimes: Every storage; empty for traces that were made up.
        scratch_bytes: What each operator is expected to take beside tensors; empty where nobody said.
    """

    operators: tuple[str, ...]
    live_bytes: npt.NDArray[np.int64]
    phases: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    lifetimes: tuple[Lifetime, ...] = ()
    scratch_bytes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        operators: Sequence[str],
        phases: Sequence[str],
        labels: Sequence[str],
        lifetimes: Sequence[Lifetime],
        scratch_bytes: Sequence[int] = (),
    ) -> Trace:
        """The trace that some lifetimes give."""
        steps = np.zeros(len(operators) + 2, dtype=np.int64)
        if lifetimes:
            born, died, amounts, _ = zip(*lifetimes, strict=True)
            np.add.at(steps, np.asarray(born), np.asarray(amounts, dtype=np.int64))
            np.subtract.at(steps, np.asarray(died), np.asarray(amounts, dtype=np.int64))
        live_bytes = np.cumsum(steps)[: len(operators)]
        return cls(
            tuple(operators), live_bytes, tuple(phases), tuple(labels), tuple(lifetimes), tuple(scratch_bytes)
        )

    @property
    def begin_bytes(self) -> int:
        """Alive before the first operator."""
        return int(self.live_bytes[0])

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at one event."""
        return int(self.live_bytes.max())

    @property
    def peak_event(self) -> int:
        """Index of the first event at which the most is alive."""
        return int(self.live_bytes.argmax())

    @property
    def end_bytes(self) -> int:
        """Alive when the trace was taken."""
        last = len(self.operators)
        if not self.lifetimes:
            return int(self.live_bytes[-1])
        return sum(each.amount_bytes for each in self.lifetimes if each.died > last)

    def without(self, holder: str) -> Trace:
        """The same run, as if what one holder has did not count."""
        others = [each for each in self.lifetimes if each.holder != holder]
        return Trace.of(self.operators, self.phases, self.labels, others, self.scratch_bytes)

    def with_scratch(self) -> Trace:
        """The same run, as if what operators are expected to take beside tensors were alive during them."""
        if not self.scratch_bytes:
            return self
        return replace(self, live_bytes=self.live_bytes + np.array(self.scratch_bytes, dtype=np.int64))

    def holders(self, event: int) -> dict[str, int]:
        """Bytes alive at an event by holder, the largest first."""
        amounts: dict[str, int] = {}
        for each in self.lifetimes:
            if each.born <= event < each.died:
                amounts[each.holder] = amounts.get(each.holder, 0) + each.amount_bytes
        return dict(sorted(amounts.items(), key=lambda item: -item[1]))

    def describe(self, event: int) -> str:
        """Which event it is, in words."""
        parts = [self.operators[event]]
        parts += [f"in {self.labels[event]}"] if self.labels and self.labels[event] else []
        parts += [f"({self.phases[event]})"] if self.phases and self.phases[event] else []
        return " ".join(parts)
