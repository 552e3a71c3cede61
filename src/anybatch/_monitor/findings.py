"""What a monitor has found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from anybatch.memory.phases import Phase
from anybatch.memory.recording import PeakHolders, PhasePeak, Step
from anybatch.memory.state import MemoryState
from anybatch.memory.timeline import Sample

__all__ = ["Findings"]


@final
@dataclass(frozen=True)
class Findings:
    """What a monitor has found so far.

    Attributes:
        kind: `"counters"` or `"tracked"`.
        memory: The device's memory when the monitor began.
        source: Who counts what is in use.
        begin_bytes: In use when the monitor began.
        live_bytes: In use at the end of the last phase.
        peak_bytes: Most in use.
        steps_done: How many steps have ended.
        phases: Each phase over all steps.
        steps: The steps that are kept.
        at_peak: Who held the peak; None where nothing has run.
        samples: What was in use over time.
    """

    kind: str
    memory: MemoryState
    source: str
    begin_bytes: int
    live_bytes: int
    peak_bytes: int
    steps_done: int
    phases: Mapping[Phase, PhasePeak]
    steps: Sequence[Step]
    at_peak: PeakHolders | None
    samples: Sequence[Sample]

    @property
    def limit_bytes(self) -> int | None:
        """What the process may hold on the device; None where nobody can tell."""
        return self.memory.limit.amount_bytes

    def scalars(self) -> dict[str, float]:
        """The figures as scalars of a logger, by name."""
        figures = {"live_bytes": self.live_bytes, "peak_bytes": self.peak_bytes}
        if self.limit_bytes is not None:
            figures["limit_bytes"] = self.limit_bytes
        figures |= {f"{phase.value}_peak_bytes": peak.peak_bytes for phase, peak in self.phases.items()}
        return {f"memory/{name}": float(amount) for name, amount in figures.items()}

    def as_data(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "kind": self.kind,
            "device": str(self.memory.device),
            "source": self.source,
            "begin_bytes": self.begin_bytes,
            "live_bytes": self.live_bytes,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "limit_source": self.memory.limit.source,
            "steps_done": self.steps_done,
            "phases": _phases_as_data(self.phases),
            "at_peak": None if self.at_peak is None else _peak_as_data(self.at_peak),
            "steps": [_step_as_data(step) for step in self.steps],
            "timeline": [[sample.time_s, sample.live_bytes, sample.phase.value] for sample in self.samples],
        }


def _phases_as_data(phases: Mapping[Phase, PhasePeak]) -> dict[str, Any]:
    return {
        phase.value: {
            "peak_bytes": peak.peak_bytes,
            "is_exact": peak.is_exact,
            "duration_s": peak.duration_s,
        }
        for phase, peak in phases.items()
    }


def _step_as_data(step: Step) -> dict[str, Any]:
    return {
        "index": step.index,
        "begin_s": step.begin_s,
        "end_s": step.end_s,
        "live_bytes": step.live_bytes,
        "peak_bytes": step.peak_bytes,
        "phases": _phases_as_data(step.phases),
    }


def _peak_as_data(peak: PeakHolders) -> dict[str, Any]:
    return {
        "peak_bytes": peak.peak_bytes,
        "phase": peak.phase.value,
        "step": peak.step,
        "holders_bytes": {holder.value: amount for holder, amount in peak.holders.items()},
        "modules_bytes": dict(peak.modules),
    }
