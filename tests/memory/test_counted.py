"""What is recorded by counters, with a gauge that tests move by hand."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from anybatch.memory.counted import CountedRecording
from anybatch.memory.holders import Holder
from anybatch.memory.phases import Phase

from .standins import Scripted

CPU = torch.device("cpu")


def recording_of(gauge: Scripted, *modules: nn.Module, sample_s: float = 0) -> CountedRecording:
    """A recording that has begun; without samples where not asked for."""
    recording = CountedRecording(gauge, CPU, modules, [], sample_s)
    recording.begin()
    return recording


def test_peak_of_each_phase_by_a_rising_mark() -> None:
    """The rise of a mark belongs to the phase in which it rose, exactly; others know their bounds only."""
    gauge = Scripted(10, 50)
    recording = recording_of(gauge)
    recording.phase_begins(Phase.FORWARD)
    gauge.held_bytes, gauge.mark_bytes = 60, 80
    recording.phase_begins(Phase.BACKWARD)
    gauge.held_bytes = 20
    recording.phase_begins(Phase.OPTIMIZER)
    gauge.mark_bytes = 90
    recording.end()
    found = {phase: (peak.peak_bytes, peak.is_exact) for phase, peak in recording.phases.items()}
    assert found == {
        Phase.OTHER: (10, False),
        Phase.FORWARD: (80, True),
        Phase.BACKWARD: (60, False),
        Phase.OPTIMIZER: (90, True),
    }
    assert (recording.begin_bytes, recording.live_bytes, recording.peak_bytes) == (10, 20, 90)


@pytest.mark.parametrize("mark_bytes", [500, None], ids=["an earlier peak", "no mark"])
def test_samples_count_where_no_mark_rises(mark_bytes: int | None) -> None:
    """What a thread meets during a phase is its peak, and that of no other phase."""
    gauge = Scripted(10, mark_bytes)
    recording = recording_of(gauge, sample_s=1e-6)
    recording.phase_begins(Phase.FORWARD)
    gauge.held_bytes = 70
    gauge.wait_for_sample()
    gauge.held_bytes = 15
    recording.phase_begins(Phase.BACKWARD)
    recording.end()
    assert recording.phases[Phase.FORWARD].peak_bytes == 70
    assert recording.phases[Phase.BACKWARD].peak_bytes == 15
    assert not recording.phases[Phase.FORWARD].is_exact
    assert max(sample.live_bytes for sample in recording.samples) == 70


def test_steps_are_told_apart() -> None:
    """Each step has its own peaks; one ends with the phase that is told to be its last."""
    gauge = Scripted(10, None)
    recording = recording_of(gauge)
    for amount in (70, 30):
        recording.phase_begins(Phase.FORWARD)
        gauge.held_bytes = amount
        recording.phase_begins(Phase.OPTIMIZER)
        recording.step_ends()
        gauge.held_bytes = 10
        recording.phase_begins(Phase.OTHER)
    recording.end()
    first, second = recording.steps
    assert (first.index, first.peak_bytes, first.live_bytes) == (0, 70, 10)
    assert (second.index, second.peak_bytes, second.live_bytes) == (1, 30, 10)
    assert second.phases[Phase.FORWARD].peak_bytes == 30
    assert first.end_s == second.begin_s
    assert recording.steps_done == 2


def test_holders_of_the_peak() -> None:
    """Parameters and gradients are known by arithmetic, and other is the rest of what is in use."""
    net = nn.Linear(10, 20)
    parameter_bytes = 220 * 4
    gauge = Scripted(10_000, None)
    recording = recording_of(gauge, net)
    recording.phase_begins(Phase.BACKWARD)
    net(torch.ones(1, 10)).sum().backward()
    gauge.held_bytes = 20_000
    recording.phase_begins(Phase.OTHER)
    gauge.held_bytes = 10_000
    recording.end()
    at_peak = recording.at_peak
    assert at_peak is not None
    assert (at_peak.peak_bytes, at_peak.phase, at_peak.step) == (20_000, Phase.BACKWARD, 0)
    assert at_peak.holders == {
        Holder.PARAMETERS: parameter_bytes,
        Holder.GRADIENTS: parameter_bytes,
        Holder.OPTIMIZER_STATE: 0,
        Holder.OTHER: 20_000 - 2 * parameter_bytes,
    }


def test_slow_gauge_is_sampled_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gauge that takes 1 ms to read is not read every millisecond, but at most 0.4 % of the time."""
    clock = iter([0.0, 0.0, 0.001])
    monkeypatch.setattr("anybatch.memory.counted.time.perf_counter", lambda: next(clock, 1.0))
    recording = CountedRecording(Scripted(10, None), CPU, [], [], 0.001)
    recording._zero_s = next(clock)
    assert recording._affordable_interval_s() == pytest.approx(0.25)


def test_no_thread_stays() -> None:
    """The thread that samples ends with the recording."""
    threads = threading.active_count()
    recording = recording_of(Scripted(10, None), sample_s=0.001)
    assert threading.active_count() == threads + 1
    recording.end()
    assert threading.active_count() == threads


def test_peak_in_a_late_step_is_known() -> None:
    """After the first steps a rise counts for the highest phase of its step, and not as exact."""
    gauge = Scripted(10, 50)
    recording = recording_of(gauge)
    for step in range(6):
        recording.phase_begins(Phase.FORWARD)
        gauge.held_bytes = 40
        if step == 4:
            gauge.mark_bytes = 90
        recording.phase_begins(Phase.OPTIMIZER)
        gauge.held_bytes = 10
        recording.step_ends()
        recording.phase_begins(Phase.OTHER)
    recording.end()
    forward = [step.phases[Phase.FORWARD] for step in recording.steps]
    assert [peak.peak_bytes for peak in forward] == [40, 40, 40, 40, 90, 40]
    assert not forward[4].is_exact
    assert recording.peak_bytes == 90
