"""What can be recorded of a training program's memory, whichever way it is counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.nn import Module
from torch.optim import Optimizer

from anybatch.memory.holders import Holder
from anybatch.memory.phases import Phase
from anybatch.memory.timeline import Sample, Timeline

__all__ = ["PeakHolders", "PhasePeak", "Recording", "Step"]

_MOST_STEPS = 10_000


@final
@dataclass(frozen=True)
class PhasePeak:
    """A phase within one step, or within all of them.

    Attributes:
        peak_bytes: Most in use during it.
        is_exact: Is that a high-water mark, or counted? Else it is the largest of samples.
        duration_s: How long it took in all.
    """

    peak_bytes: int
    is_exact: bool
    duration_s: float

    def joined(self, other: PhasePeak | None) -> PhasePeak:
        """Both as one."""
        if other is None:
            return self
        highest = max((self, other), key=lambda each: (each.peak_bytes, each.is_exact))
        return PhasePeak(highest.peak_bytes, highest.is_exact, self.duration_s + other.duration_s)


@final
@dataclass(frozen=True)
class Step:
    """One step of the training.

    Attributes:
        index: Which one, from 0.
        begin_s: When it began, in seconds since the monitor did.
        end_s: When it ended.
        live_bytes: In use at the end.
        phases: Its phases; only those that occurred.
    """

    index: int
    begin_s: float
    end_s: float
    live_bytes: int
    phases: Mapping[Phase, PhasePeak]

    @property
    def peak_bytes(self) -> int:
        """Most in use during the step."""
        return max(phase.peak_bytes for phase in self.phases.values())


@final
@dataclass(frozen=True)
class PeakHolders:
    """Who held the memory at the peak.

    Attributes:
        peak_bytes: The peak.
        phase: The phase that it was in.
        step: The step that it was in, from 0.
        holders: Bytes of each holder; what nobody is known to hold is `OTHER`.
        modules: Bytes of the activations by the module that made them; empty where that was not asked for.
    """

    peak_bytes: int
    phase: Phase
    step: int
    holders: Mapping[Holder, int]
    modules: Mapping[str, int]


class Recording(ABC):
    """Records the use of one device from `begin` to `end`. It is the listener of the phases' hooks.

    Attributes:
        source: Who counts what is in use.
        begin_bytes: In use at the begin.
        steps_done: How many steps have ended.
    """

    source: str

    def __init__(self) -> None:
        self.begin_bytes = 0
        self.steps_done = 0
        self._timeline = Timeline()
        self._steps: deque[Step] = deque(maxlen=_MOST_STEPS)
        self._step_begin_s = 0.0
        self._is_step_over = False
        self._step_phases: dict[Phase, PhasePeak] = {}
        self._phases: dict[Phase, PhasePeak] = {}
        self._at_peak: PeakHolders | None = None

    @abstractmethod
    def begin(self) -> None:
        """Begins to record."""

    @abstractmethod
    def end(self) -> None:
        """Ends the recording; nothing of it stays."""

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """In use when the last phase ended."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most in use so far."""

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """What the program is doing."""

    @property
    def phases(self) -> Mapping[Phase, PhasePeak]:
        """Each phase over all steps."""
        return self._phases

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that have ended, at most the last 10,000."""
        return self._steps

    @property
    def samples(self) -> Sequence[Sample]:
        """What was in use over time."""
        return self._timeline.samples

    @property
    def at_peak(self) -> PeakHolders | None:
        """Who held the peak; None where nothing has run."""
        return self._at_peak

    @abstractmethod
    def held_now(self) -> PeakHolders:
        """Who holds what is in use now, or was when memory ran out."""

    @abstractmethod
    def phase_begins(self, phase: Phase) -> None:
        """Another phase begins, or goes on."""

    @abstractmethod
    def step_ends(self) -> None:
        """The phase that ends next is the last of a step."""

    @abstractmethod
    def forward_begins(self, module: Module, inputs: Any) -> None:
        """A module that no other one called begins."""

    @abstractmethod
    def forward_ends(self, module: Module, outputs: Any) -> None:
        """It ends with some outputs; None where it failed."""

    @abstractmethod
    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer begins to step."""
