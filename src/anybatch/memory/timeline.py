"""What was in use over time, in a bounded number of samples that never lose a maximum."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, final

from anybatch.memory.phases import Phase

__all__ = ["Sample", "Timeline"]


class Sample(NamedTuple):
    """What was in use at one time.

    Attributes:
        time_s: Seconds since the begin.
        live_bytes: In use then.
        phase: What the program was doing.
    """

    time_s: float
    live_bytes: int
    phase: Phase


@final
class Timeline:
    """Samples in the order of time. When there are too many, of each two neighbours the larger one stays."""

    def __init__(self, most_samples: int = 20_000) -> None:
        self._most_samples = most_samples
        # Three lists rather than one of tuples, which the garbage collector would go through.
        self._times_s: list[float] = []
        self._amounts: list[int] = []
        self._phases: list[Phase] = []
        self._lock = threading.Lock()

    def add(self, time_s: float, live_bytes: int, phase: Phase) -> None:
        """Adds a sample, from any thread."""
        with self._lock:
            self._times_s.append(time_s)
            self._amounts.append(live_bytes)
            self._phases.append(phase)
            if len(self._times_s) > self._most_samples:
                self._thin()

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples that are kept."""
        with self._lock:
            samples = [*map(Sample, self._times_s, self._amounts, self._phases)]
        return tuple(sorted(samples, key=lambda sample: sample.time_s))

    def _thin(self) -> None:
        """Leaves half the samples: the first and the last, and of each two between them the larger one."""
        last = len(self._amounts) - 1
        pairs = ((at, min(at + 1, last)) for at in range(1, last, 2))
        kept = [0, *(max(pair, key=self._amounts.__getitem__) for pair in pairs), last]
        kept = list(dict.fromkeys(kept))
        self._times_s = [self._times_s[at] for at in kept]
        self._amounts = [self._amounts[at] for at in kept]
        self._phases = [self._phases[at] for at in kept]
