"""What is recorded by tracking every storage, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from anybatch.memory.holders import Holder
from anybatch.memory.phases import Phase, PhaseHooks
from anybatch.memory.tracked import TrackedRecording
from anybatch.memory.tracker import Tracker

CPU = torch.device("cpu")
ROWS = 6
# Linear(10, 20), Tanh, Linear(20, 5) in float32.
PARAMETERS = (10 * 20 + 20 + 20 * 5 + 5) * 4
INPUT = ROWS * 10 * 4
HIDDEN = ROWS * 20 * 4
OUTPUT = ROWS * 5 * 4
SCALAR = 4


@contextmanager
def tracking(*modules: nn.Module, per_module: bool = False) -> Iterator[TrackedRecording]:
    """Records a block by its hooks."""
    recording = TrackedRecording(CPU, modules, [], per_module)
    hooks = PhaseHooks(modules, recording)
    recording.begin()
    hooks.install()
    try:
        yield recording
    finally:
        hooks.remove()
        recording.end()


def net_of_two_layers() -> nn.Sequential:
    """Two linear layers with a tanh in between."""
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))


def test_holders_in_the_middle_of_a_step() -> None:
    """After forward: parameters, the input, the output, and the hidden tensor that backward needs."""
    net = net_of_two_layers()
    with tracking(net) as recording:
        output = net(torch.ones(ROWS, 10))
        held = recording.held_now()
    assert held.holders == {
        Holder.PARAMETERS: PARAMETERS,
        Holder.GRADIENTS: 0,
        Holder.OPTIMIZER_STATE: 0,
        # Tanh keeps its own output; what Linear gives it is gone.
        Holder.ACTIVATIONS: HIDDEN,
        Holder.INPUTS: INPUT,
        Holder.OUTPUTS: OUTPUT,
        Holder.OTHER: 0,
    }
    assert output.shape == (ROWS, 5)


def test_holders_after_a_step_of_adam() -> None:
    """After a step: parameters, gradients of their size, and Adam's state of twice their size."""
    net = net_of_two_layers()
    optimizer = torch.optim.Adam(net.parameters())
    with tracking(net) as recording:
        net(torch.ones(ROWS, 10)).sum().backward()
        optimizer.step()
        held = recording.held_now()
    assert held.holders[Holder.PARAMETERS] == PARAMETERS
    assert held.holders[Holder.GRADIENTS] == PARAMETERS
    assert held.holders[Holder.OPTIMIZER_STATE] == 2 * PARAMETERS + 4 * SCALAR
    assert held.peak_bytes == 4 * PARAMETERS + 4 * SCALAR
    assert recording.steps[0].live_bytes == held.peak_bytes


def test_peak_of_forward_by_arithmetic() -> None:
    """Forward's peak: parameters, input, and both hidden tensors, before tanh's input is gone."""
    net = net_of_two_layers()
    with tracking(net) as recording:
        net(torch.ones(ROWS, 10))
    assert recording.phases[Phase.FORWARD].peak_bytes == PARAMETERS + INPUT + 2 * HIDDEN
    assert recording.phases[Phase.FORWARD].is_exact
    assert recording.peak_bytes == PARAMETERS + INPUT + 2 * HIDDEN


def test_peaks_of_steps_repeat() -> None:
    """From the second step on, each step has the same peaks in the same phases, to the byte."""
    net = net_of_two_layers()
    optimizer = torch.optim.Adam(net.parameters())
    with tracking(net) as recording:
        for _ in range(4):
            net(torch.ones(ROWS, 10)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    peaks = [{phase: peak.peak_bytes for phase, peak in step.phases.items()} for step in recording.steps]
    assert len(peaks) == 4
    assert peaks[1] == peaks[2] == peaks[3]
    assert set(peaks[1]) == set(Phase)
    assert recording.peak_bytes == max(step.peak_bytes for step in recording.steps)
    assert recording.at_peak is not None
    assert sum(recording.at_peak.holders.values()) == recording.peak_bytes


def test_gradients_at_the_peak_of_backward() -> None:
    """A gradient that exists already counts as one at the peak, though it is claimed after it."""
    net = nn.Linear(1000, 1000, bias=False)
    with tracking(net) as recording:
        net(torch.ones(1, 1000)).sum().backward()
    at_peak = recording.at_peak
    assert at_peak is not None
    assert at_peak.phase is Phase.BACKWARD
    assert at_peak.holders[Holder.GRADIENTS] == at_peak.holders[Holder.PARAMETERS] == 4_000_000


def test_activations_by_module() -> None:
    """Activations are told apart by the module whose forward made them, by its path."""
    net = net_of_two_layers()
    with tracking(net, per_module=True) as recording:
        output = net(torch.ones(ROWS, 10))
        held = recording.held_now()
    assert held.modules == {"Sequential.1": HIDDEN}
    assert output.requires_grad


def test_program_without_steps_keeps_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that never steps an optimizer, as evaluation does, does not keep its events for ever."""
    monkeypatch.setattr("anybatch.memory.tracked._MOST_EVENTS", 20)
    net = net_of_two_layers()
    with tracking(net) as recording, torch.no_grad():
        for _ in range(50):
            net(torch.ones(ROWS, 10))
            assert len(recording._times_s) < 60
    assert recording.steps_done == 0
    assert recording.peak_bytes == PARAMETERS + INPUT + 2 * HIDDEN


def test_no_mode_and_no_hook_stays() -> None:
    """Afterwards no dispatch mode is active and no module has a hook (Rule 7)."""
    net = net_of_two_layers()
    before, resize = _get_current_dispatch_mode(), torch.UntypedStorage.resize_
    with tracking(net, per_module=True):
        net(torch.ones(ROWS, 10)).sum().backward()
    assert _get_current_dispatch_mode() is before
    assert torch.UntypedStorage.resize_ is resize
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in net.modules())


def test_results_are_those_of_the_program_alone() -> None:
    """Outputs, gradients and random state are bit for bit what they are without a recording."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(10, 20), nn.Dropout(0.5), nn.Linear(20, 5))
        output = net(torch.ones(ROWS, 10))
        output.sum().backward()
        return [output, *(p.grad for p in net.parameters() if p.grad is not None), torch.get_rng_state()]

    expected = run()
    with tracking():
        found = run()
    assert len(found) == len(expected) == 6
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_claim_stays_with_the_first() -> None:
    """A storage that somebody has claimed is not another's; one that is not known is held from then on."""
    before = torch.ones(4)
    with Tracker() as tracker:
        made = torch.ones(2)
        tracker.claim([before, made], "first")
        tracker.claim([made, before.view(2, 2)], "second")
        trace = tracker.trace()
        assert trace.holders(len(trace.operators) - 1) == {"first": 8}
        assert tracker.live_bytes == 24


def test_restart_keeps_what_is_alive() -> None:
    """After a restart what is alive is there at the begin, and what died is forgotten with its events."""
    with Tracker() as tracker:
        kept = torch.ones(4)
        torch.ones(1000)
        tracker.restart()
        assert tracker.trace().peak_bytes == tracker.trace().begin_bytes == 16
        assert kept.add(1).sum().item() == 8
        assert tracker.peak_bytes == 16 + 16 + 4
