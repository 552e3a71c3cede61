"""Recording by counters: what the device or the system says is in use, read at the bounds of phases."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakSet

import torch
from torch.nn import Module
from torch.optim import Optimizer

from anybatch.memory.gauge import Gauge
from anybatch.memory.holders import Holder, held_bytes
from anybatch.memory.phases import Phase
from anybatch.memory.recording import PeakHolders, PhasePeak, Recording, Step
from anybatch.memory.sampler import Sampler

__all__ = ["CountedRecording"]

# A sample may take this part of the time at most: a gauge that is slow is read less often.
_SAMPLED_RATIO = 0.004
# For so many steps the marks are read at the bounds of each phase.
_CAREFUL_STEPS = 3
# Who holds the peak is looked up again when it has grown by this part of all growth since the begin.
_GROWTH_RATIO = 0.01


@dataclass
class _Span:
    """A stretch of time in one phase."""

    phase: Phase
    begin_s: float
    peak_bytes: int


@final
class CountedRecording(Recording):
    """Reads a gauge where phases begin and end, and in a thread in between.

    Error: where an earlier peak hides that of a phase, samples count, which may miss what lasts less than
    the time between two of them. A new peak after the first three steps is known, its phase guessed. Who
    holds the peak is looked up at the end of its phase.
    """

    def __init__(
        self,
        gauge: Gauge,
        device: torch.device,
        modules: Iterable[Module],
        optimizers: Iterable[Optimizer],
        sample_s: float,
    ) -> None:
        """Prepares to record.

        Args:
            gauge: Reads what is in use.
            device: The device that it reads.
            modules: Modules whose parameters count from the begin; others count when they run.
            optimizers: Optimizers whose state counts from the begin; that of others when they step.
            sample_s: Seconds between two samples, or more where a reading takes long; 0 for none.
        """
        super().__init__()
        self.source = gauge.source
        self._gauge = gauge
        self._device = device
        self._modules: WeakSet[Module] = WeakSet(modules)
        self._optimizers: WeakSet[Optimizer] = WeakSet(optimizers)
        self._sample_s = sample_s
        self._sampler = Sampler(self._sample, 0)
        self._zero_s = 0.0
        self._live_bytes = self._mark_bytes = 0
        self._span = _Span(Phase.OTHER, 0.0, 0)
        self._careful_steps = _CAREFUL_STEPS

    @property
    def live_bytes(self) -> int:
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        ended = max((phase.peak_bytes for phase in self._phases.values()), default=0)
        return max(ended, self._span.peak_bytes)

    @property
    def phase(self) -> Phase:
        return self._span.phase

    def held_now(self) -> PeakHolders:
        return self._holders(max(self._gauge.live_bytes(), self._span.peak_bytes))

    def begin(self) -> None:
        self._zero_s = time.perf_counter()
        self._sampler = Sampler(self._sample, self._affordable_interval_s())
        self._sampler.start()
        self.begin_bytes, most = self._gauge.glance()
        self._mark_bytes = 0 if most is None else most.mark_bytes
        self._live_bytes = self.begin_bytes
        self._open(Phase.OTHER)

    def end(self) -> None:
        self._sampler.stop()
        self._is_step_over = True  # so that the marks are read
        self._close()

    def phase_begins(self, phase: Phase) -> None:
        self._close()
        self._open(phase)
        if self._is_step_over:
            self._end_step()

    def step_ends(self) -> None:
        self._is_step_over = True

    def forward_begins(self, module: Module, inputs: Any) -> None:
        self._modules.add(module)

    def forward_ends(self, module: Module, outputs: Any) -> None:
        pass

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._meet_state()

    def _end_step(self) -> None:
        begin_s, now_s, self._step_begin_s = self._step_begin_s, self._span.begin_s, self._span.begin_s
        phases, self._step_phases = self._step_phases, {}
        self._steps.append(Step(self.steps_done, begin_s, now_s, self._live_bytes, phases))
        self.steps_done += 1
        self._is_step_over = False
        self._careful_steps = max(0, self._careful_steps - 1)

    def _open(self, phase: Phase) -> None:
        self._span = _Span(phase, self._now_s(), self._live_bytes)
        self._timeline.add(self._span.begin_s, self._live_bytes, phase)

    def _close(self) -> None:
        span, now_s = self._span, self._now_s()
        self._live_bytes, risen_bytes = self._look()
        self._timeline.add(now_s, self._live_bytes, span.phase)
        seen_bytes, took_s = max(span.peak_bytes, self._live_bytes), now_s - span.begin_s
        if risen_bytes is None:
            self._add(span.phase, PhasePeak(seen_bytes, False, took_s))
        elif self._careful_steps > 0:
            self._add(span.phase, PhasePeak(max(seen_bytes, risen_bytes), True, took_s))
        else:
            self._add(span.phase, PhasePeak(seen_bytes, False, took_s))
            self._add_to_highest(risen_bytes)

    def _look(self) -> tuple[int, int | None]:
        """What is in use, and what a mark says that has risen since the last look at it.

        Reading a mark costs far more than reading what is in use, and marks rise in the first steps: after
        these they are read once a step only.
        """
        if self._careful_steps == 0 and not self._is_step_over:
            return self._gauge.live_bytes(), None
        live_bytes, most = self._gauge.glance()
        if most is None or most.mark_bytes <= self._mark_bytes:
            return live_bytes, None
        self._mark_bytes = most.mark_bytes
        return live_bytes, most.amount_bytes

    def _add_to_highest(self, peak_bytes: int) -> None:
        """A mark rose somewhere in this step: most likely in its highest phase. Look closely from now on."""
        highest = max(self._step_phases, key=lambda phase: self._step_phases[phase].peak_bytes)
        self._add(highest, PhasePeak(peak_bytes, False, 0.0))
        self._careful_steps = _CAREFUL_STEPS

    def _add(self, phase: Phase, found: PhasePeak) -> None:
        for phases in (self._step_phases, self._phases):
            phases[phase] = found.joined(phases.get(phase))
        known_bytes = -1 if self._at_peak is None else self._at_peak.peak_bytes
        if found.peak_bytes - known_bytes > _GROWTH_RATIO * (found.peak_bytes - self.begin_bytes):
            self._at_peak = replace(self._holders(found.peak_bytes), phase=phase)

    def _holders(self, peak_bytes: int) -> PeakHolders:
        holders = dict(held_bytes(self._modules, self._optimizers, self._device))
        holders[Holder.OTHER] = max(0, peak_bytes - sum(holders.values()))
        return PeakHolders(peak_bytes, self._span.phase, self.steps_done, holders, {})

    def _meet_state(self) -> None:
        """What an optimizer holds before it steps was there at the peak already."""
        if self._at_peak is not None:
            found = self._holders(self._at_peak.peak_bytes).holders
            holders = {**found, Holder.GRADIENTS: self._at_peak.holders[Holder.GRADIENTS]}
            known_bytes = sum(holders.values()) - holders[Holder.OTHER]
            holders[Holder.OTHER] = max(0, self._at_peak.peak_bytes - known_bytes)
            self._at_peak = replace(self._at_peak, holders=holders)

    def _now_s(self) -> float:
        return time.perf_counter() - self._zero_s

    def _affordable_interval_s(self) -> float:
        begin_s = time.perf_counter()
        self._gauge.live_bytes()
        reading_s = time.perf_counter() - begin_s
        return max(self._sample_s, reading_s / _SAMPLED_RATIO) if self._sample_s > 0 else 0.0

    def _sample(self) -> None:
        span = self._span
        live_bytes = self._gauge.live_bytes()
        # One that was read across a boundary could belong to either phase.
        if span is self._span:
            span.peak_bytes = max(span.peak_bytes, live_bytes)
            self._timeline.add(self._now_s(), live_bytes, span.phase)
