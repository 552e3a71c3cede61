"""Recording by counting: every storage of a device, from the operator that makes it until it dies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from anybatch.memory.holders import Holder, tensors_of
from anybatch.memory.module_path import ModulePath
from anybatch.memory.phases import Phase
from anybatch.memory.recording import PeakHolders, PhasePeak, Recording, Step
from anybatch.memory.trace import Trace
from anybatch.memory.tracker import Tracker

__all__ = ["TrackedRecording"]

# A program that never steps an optimizer must not keep all its events.
_MOST_EVENTS = 100_000
_PHASES = {phase.value: phase for phase in Phase}


@final
class TrackedRecording(Recording):
    """Counts storages with a tracker, which begins anew after each step.

    What was there before the begin counts where a module, an optimizer or an input leads to it.
    """

    source = "bytes of tensors"

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[Module],
        optimizers: Iterable[Optimizer],
        per_module: bool,
    ) -> None:
        """Prepares to record.

        Args:
            device: Whose storages count.
            modules: Modules whose parameters count from the begin; others count when they run.
            optimizers: Optimizers whose state counts from the begin; that of others when they step.
            per_module: Tell activations apart by the module that makes them.
        """
        super().__init__()
        self._device = device
        self._given = modules
        self._path = ModulePath() if per_module else None
        self._modules: WeakSet[Module] = WeakSet()
        self._optimizers: WeakSet[Optimizer] = WeakSet(optimizers)
        self._tracker = Tracker(self._label)
        self._times_s = [0.0]
        self._zero_s = 0.0
        self._phase = Phase.OTHER
        self._phase_begin_s = 0.0

    @property
    def live_bytes(self) -> int:
        return self._tracker.trace(self._device).end_bytes

    @property
    def peak_bytes(self) -> int:
        return max(self._tracker.trace(self._device).peak_bytes, self._seen_peak_bytes())

    @property
    def phase(self) -> Phase:
        return self._phase

    def held_now(self) -> PeakHolders:
        self._claim_known()
        trace = self._tracker.trace(self._device)
        return self._holders(trace, len(trace.operators) - 1, trace.end_bytes)

    def begin(self) -> None:
        self._modules.update(self._given)
        self._claim_known()
        self.begin_bytes = self.live_bytes
        if self._path is not None:
            self._path.install(self._given)
        self._zero_s = time.perf_counter()
        self._tracker.__enter__()

    def end(self) -> None:
        try:
            self._tracker.__exit__(None, None, None)
        finally:
            if self._path is not None:
                self._path.remove()
        self._add_duration()
        self._fold()

    def phase_begins(self, phase: Phase) -> None:
        if self._phase is Phase.BACKWARD:
            self._claim_known()
        self._add_duration()
        self._phase = phase
        self._tracker.phase = phase.value
        if self._is_step_over:
            self._end_step()
        elif len(self._times_s) > _MOST_EVENTS:
            self._fold()

    def step_ends(self) -> None:
        self._claim_known()
        self._is_step_over = True

    def forward_begins(self, module: Module, inputs: Any) -> None:
        self._meet(module)
        self._tracker.claim(self._here(tree_leaves(inputs)), Holder.INPUTS.value)

    def forward_ends(self, module: Module, outputs: Any) -> None:
        self._tracker.claim(self._here(tree_leaves(outputs)), Holder.OUTPUTS.value)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._claim_known()

    def _meet(self, module: Module) -> None:
        if module not in self._modules:
            self._modules.add(module)
            self._claim_known()

    def _claim_known(self) -> None:
        for holder, tensors in tensors_of(self._modules, self._optimizers).items():
            self._tracker.claim(self._here(tensors), holder.value)

    def _here(self, values: Iterable[Any]) -> Iterator[Tensor]:
        return (each for each in values if isinstance(each, Tensor) and each.device == self._device)

    def _label(self) -> str:
        self._times_s.append(time.perf_counter() - self._zero_s)
        return "" if self._path is None else self._path.current

    def _add_duration(self) -> None:
        now_s = time.perf_counter() - self._zero_s
        took = PhasePeak(0, True, now_s - self._phase_begin_s)
        self._phase_begin_s = now_s
        for phases in (self._step_phases, self._phases):
            phases[self._phase] = took.joined(phases.get(self._phase))

    def _end_step(self) -> None:
        live_bytes = self._fold()
        begin_s, self._step_begin_s = self._step_begin_s, self._phase_begin_s
        phases, self._step_phases = self._step_phases, {}
        self._steps.append(Step(self.steps_done, begin_s, self._step_begin_s, live_bytes, phases))
        self.steps_done += 1
        self._is_step_over = False

    def _fold(self) -> int:
        """Takes the peaks out of what was tracked, and begins anew; returns what is alive."""
        self._claim_known()
        trace = self._tracker.trace(self._device)
        of_event = np.array([_PHASES.get(name, Phase.OTHER).value for name in trace.phases])
        for name in np.unique(of_event):
            found = PhasePeak(int(trace.live_bytes[of_event == name].max()), True, 0.0)
            for phases in (self._step_phases, self._phases):
                phases[_PHASES[name]] = found.joined(phases.get(_PHASES[name]))
        for time_s, amount, name in zip(self._times_s, trace.live_bytes.tolist(), of_event, strict=False):
            self._timeline.add(time_s, amount, _PHASES[name])
        if self._at_peak is None or trace.peak_bytes > self._at_peak.peak_bytes:
            self._at_peak = self._holders(trace, trace.peak_event, trace.peak_bytes)
        self._tracker.restart()
        self._times_s = [time.perf_counter() - self._zero_s]
        return trace.end_bytes

    def _seen_peak_bytes(self) -> int:
        return max((phase.peak_bytes for phase in self._phases.values()), default=0)

    def _holders(self, trace: Trace, event: int, amount_bytes: int) -> PeakHolders:
        holders = dict.fromkeys(Holder, 0)
        modules: dict[str, int] = {}
        for each in trace.lifetimes:
            if not each.born <= event < each.died:
                continue
            holder = _holder_of(each.holder)
            holders[holder] += each.amount_bytes
            label = trace.labels[each.born] if holder is Holder.ACTIVATIONS else ""
            if label:
                modules[label] = modules.get(label, 0) + each.amount_bytes
        phase = _PHASES.get(trace.phases[event], Phase.OTHER)
        return PeakHolders(amount_bytes, phase, self.steps_done, holders, modules)


def _holder_of(name: str) -> Holder:
    """Who claimed a storage; else what was made in forward and is still alive is an activation."""
    if name == Phase.FORWARD.value:
        return Holder.ACTIVATIONS
    return next((holder for holder in Holder if holder.value == name), Holder.OTHER)
