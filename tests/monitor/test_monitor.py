"""`anybatch.MemoryMonitor` around real training."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

import anybatch
from anybatch.memory.holders import Holder
from anybatch.memory.phases import Phase

# Linear(10, 20) and Linear(20, 5) in float32.
PARAMETERS = (10 * 20 + 20 + 20 * 5 + 5) * 4
KINDS = pytest.mark.parametrize("kind", ["counters", "tracked"])


def net_and_optimizer() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A small net, and Adam for it."""
    net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    return net, torch.optim.Adam(net.parameters())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """A plain loop."""
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(6, 10)).square().sum().backward()
        optimizer.step()


@KINDS
@pytest.mark.parametrize("is_named", [True, False])
def test_steps_and_phases_of_a_plain_loop(kind: Any, is_named: bool) -> None:
    """Two steps of a plain loop are two steps, each with all its phases, whatever the peak is."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(*([net] if is_named else []), kind=kind) as monitor:
        train(net, optimizer)
    findings = monitor.findings
    assert findings.steps_done == 2
    assert all(set(step.phases) == set(Phase) for step in findings.steps)
    assert findings.peak_bytes == max(peak.peak_bytes for peak in findings.phases.values())
    assert findings.peak_bytes >= findings.live_bytes > 0
    assert findings.limit_bytes is not None


@KINDS
def test_steps_of_a_decorated_function(kind: Any) -> None:
    """A decorated function in micro-batches ends one step per optimizer step, with the same gradients."""
    net, optimizer = net_and_optimizer()
    x, label = torch.randn(7, 10), torch.randn(7, 5)

    @anybatch.apply(["x", "label"], ub_size=2)
    def step(x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.mse_loss(net(x), label)

    nn.functional.mse_loss(net(x), label).backward()
    expected = [p.grad for p in net.parameters()]
    optimizer.zero_grad()
    with anybatch.MemoryMonitor(net, kind=kind) as monitor:
        step(x=x, label=label)
        found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        optimizer.step()
    torch.testing.assert_close(found, expected)
    assert monitor.findings.steps_done == 1
    assert {Phase.FORWARD, Phase.BACKWARD} <= set(monitor.findings.phases)


@pytest.mark.parametrize(
    ("kind", "names_optimizer"), [("counters", True), ("counters", False), ("tracked", True)]
)
def test_holders_by_arithmetic(kind: Any, names_optimizer: bool) -> None:
    """Parameters, gradients and Adam's state at the peak are known to the byte, in either way of counting."""
    net, optimizer = net_and_optimizer()
    train(net, optimizer)
    ballast: list[Tensor] = []
    net.register_forward_hook(lambda *_: ballast.append(torch.ones(16 << 20)))
    watched = [net, optimizer] if names_optimizer else [net]
    with anybatch.MemoryMonitor(*watched, kind=kind) as monitor:
        optimizer.zero_grad(set_to_none=False)
        net(torch.ones(6, 10)).square().sum().backward()
        optimizer.step()
    at_peak = monitor.findings.at_peak
    assert at_peak is not None
    assert at_peak.holders[Holder.PARAMETERS] == PARAMETERS
    assert at_peak.holders[Holder.GRADIENTS] == PARAMETERS
    assert at_peak.holders[Holder.OPTIMIZER_STATE] == 2 * PARAMETERS + 4 * 4
    assert sum(at_peak.holders.values()) == at_peak.peak_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_counters_see_the_memory_of_the_process() -> None:
    """A module that holds 200 MiB for its forward alone shows in forward's peak, and in no other's."""

    class Heavy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            block = torch.ones(50 << 20)
            for _ in range(20):
                block.sum()
            return x * block[0]

    net = Heavy()
    with anybatch.MemoryMonitor(net) as monitor:
        net(torch.ones(1))
    grown = {
        phase: (peak.peak_bytes - monitor.findings.begin_bytes) >> 20
        for phase, peak in monitor.findings.phases.items()
    }
    assert grown[Phase.FORWARD] == pytest.approx(200, abs=20)
    assert grown[Phase.OTHER] == pytest.approx(0, abs=20)


def state_of_process() -> list[Any]:
    """What a monitor could leave behind: hooks, modes, threads."""
    return [
        dict(_global_forward_hooks),
        dict(_global_forward_pre_hooks),
        dict(_global_optimizer_pre_hooks),
        dict(_global_optimizer_post_hooks),
        _get_current_dispatch_mode(),
        torch.UntypedStorage.resize_,
        threading.active_count(),
        torch.get_rng_state().tolist(),
    ]


@KINDS
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_monitor_leaves_no_trace(kind: Any, is_named: bool, fails: bool) -> None:
    """After the block, failed or not, hooks, modes, threads and random state are as before (Rule 7)."""
    net, optimizer = net_and_optimizer()
    train(net, optimizer)
    before = state_of_process()
    monitor = anybatch.MemoryMonitor(*([net] if is_named else []), kind=kind)

    def block() -> None:
        with monitor:
            train(net, optimizer)
            if fails:
                net(torch.ones(6, 99))

    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            block()
    else:
        block()
    assert state_of_process() == before
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in net.modules())
    assert monitor.findings.steps_done == 2


@KINDS
def test_monitor_keeps_no_model_alive(kind: Any) -> None:
    """A monitor that is still there does not keep the tensors of what it watched."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(kind=kind) as monitor:
        output = net(torch.ones(6, 10))
        output.sum().backward()
    watched = [weakref.ref(output), weakref.ref(net)]
    del net, optimizer, output
    gc.collect()
    assert [each() for each in watched] == [None, None]
    assert monitor.findings.peak_bytes > 0


def test_results_with_and_without_a_monitor() -> None:
    """Trained parameters are bit for bit the same, watched or not."""
    results = []
    for kind in (None, "counters", "tracked"):
        torch.manual_seed(3)
        net, optimizer = net_and_optimizer()
        if kind is None:
            train(net, optimizer)
        else:
            with anybatch.MemoryMonitor(kind=kind):  # type: ignore[arg-type]  # a str that is one of them
                train(net, optimizer)
        results.append([p.detach().clone() for p in net.parameters()])
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def test_nested_monitors() -> None:
    """A monitor inside of another sees its own steps, and the outer one sees all."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(net) as outer:
        train(net, optimizer, steps=1)
        with anybatch.MemoryMonitor(net, kind="tracked") as inner, anybatch.MemoryMonitor() as third:
            train(net, optimizer, steps=2)
        train(net, optimizer, steps=1)
    assert [each.findings.steps_done for each in (outer, inner, third)] == [4, 2, 2]


def test_monitor_can_watch_again_but_not_twice_at_once() -> None:
    """A second block begins anew; one inside of the first is refused, which the first survives."""
    net, optimizer = net_and_optimizer()
    monitor = anybatch.MemoryMonitor(net)
    with monitor:
        train(net, optimizer, steps=3)
    with monitor:
        with pytest.raises(RuntimeError, match="one block at a time"):
            monitor.__enter__()
        train(net, optimizer, steps=1)
    assert monitor.findings.steps_done == 1


OUT_OF_MEMORY = """
import sys, torch, anybatch
from torch import nn
from anybatch.memory.limit import limit_growth
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
optimizer = torch.optim.Adam(net.parameters())
def step(rows):
    net(torch.ones(rows, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step(8)
limit_growth(100 << 20)
try:
    with anybatch.MemoryMonitor(net, kind=sys.argv[1]):
        with anybatch.MemoryMonitor(net, kind=sys.argv[1]):
            step(8)
            step(20_000)
except RuntimeError as error:
    print(len(error.__notes__))
    print(error.__notes__[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory in RLIMIT_DATA")
@KINDS
def test_out_of_memory_is_explained(kind: str) -> None:
    """A real out-of-memory error has one note, with the phase, the step, who held what, and the limit."""
    command = [sys.executable, "-c", OUT_OF_MEMORY, kind]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    count, note = run.stdout.splitlines()
    assert count == "1"
    assert "memory ran out in phase 'forward' of step 1" in note
    assert "(RLIMIT_DATA)" in note
    # 1001 * 1000 + 1001 floats, and twice as many of Adam's.
    assert "parameters and buffers 3.8 MiB" in note
    assert "optimizer state 7.6 MiB" in note


def test_other_errors_have_no_note() -> None:
    """An error that says nothing of memory passes as it is."""
    net, _ = net_and_optimizer()

    def fail() -> None:
        with anybatch.MemoryMonitor(net):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        fail()
    assert not getattr(raised.value, "__notes__", [])


def test_postfix_is_short() -> None:
    """A progress bar gets live, peak and limit in words, also during the block."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(net, kind="tracked") as monitor:
        train(net, optimizer)
        postfix = monitor.postfix()
    assert list(postfix) == ["live", "peak", "limit"]
    assert postfix["live"] == f"{(4 * PARAMETERS + 16) / 1024:.1f} KiB"


class Writer:
    """Has the method that TensorBoard's `SummaryWriter` has."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag] = (scalar_value, global_step)


def test_log_to_a_writer_and_to_a_function() -> None:
    """Either gets the same figures under the same names, with the step."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(net, kind="tracked") as monitor:
        train(net, optimizer)
    writer, called = Writer(), []
    monitor.log(writer, 7)
    monitor.log(lambda scalars, step: called.append((scalars, step)), 7)
    ((scalars, step),) = called
    assert step == 7
    assert writer.scalars == {name: (amount, 7) for name, amount in scalars.items()}
    assert scalars["memory/live_bytes"] == 4 * PARAMETERS + 16
    assert scalars["memory/peak_bytes"] == max(scalars[f"memory/{phase.value}_peak_bytes"] for phase in Phase)


def test_json_holds_everything(tmp_path: Path) -> None:
    """The JSON is read back with the figures of the findings, from the text and from the file."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(net, kind="tracked", per_module=True) as monitor:
        train(net, optimizer)
    text = monitor.to_json(tmp_path / "memory.json")
    assert (tmp_path / "memory.json").read_text() == text
    read = json.loads(text)
    findings = monitor.findings
    assert read["peak_bytes"] == findings.peak_bytes
    assert read["device"] == "cpu"
    assert [step["peak_bytes"] for step in read["steps"]] == [step.peak_bytes for step in findings.steps]
    assert read["at_peak"]["holders_bytes"]["gradients"] == PARAMETERS
    assert len(read["timeline"]) == len(findings.samples)
    assert set(read["phases"]) == {phase.value for phase in Phase}


@KINDS
@pytest.mark.parametrize("width", [80, 120])
def test_report_prints_phases_and_holders(kind: Any, width: int) -> None:
    """The report names each phase and holder, with the peak in words, and every line fits."""
    net, optimizer = net_and_optimizer()
    with anybatch.MemoryMonitor(net, kind=kind, per_module=kind == "tracked") as monitor:
        train(net, optimizer)
        net(torch.ones(1000, 10))
    console = Console(file=io.StringIO(), width=width)
    monitor.report(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO from above
    assert all(len(line) <= width for line in text.splitlines())
    assert all(phase.value in text for phase in Phase)
    assert all(word in text for word in ("gradients", "optimizer state", "limit", "2 steps"))
    assert "Sequential" in text or kind == "counters"
    assert "2 steps" in str(monitor)


def test_monitor_that_has_not_run_says_so() -> None:
    """Without a block there is nothing to report, which is said rather than shown as zeros."""
    monitor = anybatch.MemoryMonitor()
    assert "has not run" in str(monitor)
    with pytest.raises(RuntimeError, match="has not run"):
        monitor.report()


BAD: dict[str, dict[str, Any]] = {
    "kind": {"kind": "guessed"},
    "per_module": {"per_module": True},
    "sample_s": {"sample_s": -1.0},
}


@pytest.mark.parametrize("options", BAD.values(), ids=list(BAD))
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """An option that means nothing is refused by name before the block."""
    with pytest.raises(ValueError, match=next(iter(options))):
        anybatch.MemoryMonitor(nn.Linear(1, 1), **options)


def test_only_modules_and_optimizers_are_watched() -> None:
    """Anything else is refused by its type."""
    with pytest.raises(TypeError, match="Tensor"):
        anybatch.MemoryMonitor(torch.ones(1))  # type: ignore[arg-type]  # the wrong type is the point


def test_device_that_is_not_here_is_refused() -> None:
    """A device that this machine lacks is refused before the block."""
    if torch.accelerator.is_available():
        pytest.skip("has an accelerator")
    with pytest.raises(ValueError, match="device"):
        anybatch.MemoryMonitor(device="cuda:3")
