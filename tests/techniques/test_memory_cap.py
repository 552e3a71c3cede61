"""Ceilings on what a process may hold."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.techniques.training import assert_equal, two_steps
from torch import nn

from anybatch.errors import TechniqueError
from anybatch.memory.process import data_bytes
from anybatch.techniques import MemoryCap, Setting
from anybatch.techniques.ceilings import DataLimit, MetalLimit

_GIB = 1 << 30
_HIGH, _LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts all data of a process")


def on(device: str) -> Setting:
    return Setting(nn.Identity(), None, torch.device(device))


def soft_limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)[0]


@on_linux
def test_too_much_raises_under_a_cap_and_fits_after_it() -> None:
    """256 MiB do not fit under a cap 64 MiB above what is held; they do once it is gone."""
    before = soft_limit()
    cap = MemoryCap(max_bytes=data_bytes() + (64 << 20))
    with cap.applied(on("cpu")):
        assert soft_limit() == cap.max_bytes
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            torch.empty(64 << 20)
    assert soft_limit() == before
    torch.empty(64 << 20)


@on_linux
def test_a_fraction_is_one_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the host's memory, or of the control group's where that has less."""
    total_bytes = 4 * data_bytes()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10 * total_bytes))
    group = SimpleNamespace(limit_bytes=total_bytes)
    monkeypatch.setattr("anybatch.techniques.ceilings.group_limits", lambda: (group,))
    with MemoryCap(fraction=0.5).applied(on("cpu")):
        assert soft_limit() == total_bytes // 2


@on_linux
@pytest.mark.parametrize(
    ("max_bytes", "reason"),
    [(1, "are held already"), (1 << 60, "is the most already")],
)
def test_a_cap_that_can_not_hold_is_refused(max_bytes: int, reason: str) -> None:
    """Less than is held, or more than there is, is said, and nothing is changed."""
    before = soft_limit()
    with pytest.raises(TechniqueError, match=reason), MemoryCap(max_bytes=max_bytes).applied(on("cpu")):
        raise AssertionError("not reached")
    assert soft_limit() == before


@on_linux
def test_a_lower_limit_that_is_there_is_said() -> None:
    """A cap above another does nothing, so it is refused (Rule 8)."""
    lower, higher = (MemoryCap(max_bytes=data_bytes() + more) for more in (1 * _GIB, 2 * _GIB))
    with lower.applied(on("cpu")), pytest.raises(TechniqueError, match="is the most already"):
        higher.check(on("cpu"))


@on_linux
def test_a_system_that_does_not_keep_the_limit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more can be mapped all the same, the cap is refused and the limit is as before."""
    monkeypatch.setattr("anybatch.techniques.ceilings.can_map", lambda size_bytes: True)
    before = soft_limit()
    cap = MemoryCap(max_bytes=data_bytes() + _GIB)
    with pytest.raises(TechniqueError, match="maps more than"), cap.applied(on("cpu")):
        raise AssertionError("not reached")
    assert soft_limit() == before


def test_off_linux_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems do not count all data of a process."""
    monkeypatch.setattr("anybatch.techniques.ceilings.can_limit_growth", lambda: False)
    with pytest.raises(TechniqueError, match="only Linux counts all data"):
        MemoryCap(fraction=0.5).check(on("cpu"))


class Allocator:
    """Stands in for a device's module: 80 GiB, a ceiling, and 10 GiB held."""

    def __init__(self) -> None:
        self.fraction = 1.0
        self.seen: list[float] = []

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=80 * _GIB)

    def memory_reserved(self, device: torch.device) -> int:
        return 10 * _GIB

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        assert device.index is not None
        self.fraction = fraction
        self.seen.append(fraction)


@pytest.fixture(name="allocator")
def _allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: allocator)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return allocator


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu:0"])
@pytest.mark.parametrize("cap", [MemoryCap(fraction=0.25), MemoryCap(max_bytes=20 * _GIB)])
def test_an_allocator_gets_a_fraction_and_its_own_back(
    device: str, cap: MemoryCap, allocator: Allocator
) -> None:
    """20 of 80 GiB are a quarter; afterwards the fraction is what it was, after errors too."""
    allocator.fraction = 0.9
    with pytest.raises(KeyError), cap.applied(on(device)):
        raise KeyError
    assert allocator.seen == [0.25, 0.9]


@pytest.mark.parametrize(
    ("cap", "reason"),
    [
        (MemoryCap(fraction=0.1), "10.0 GiB are held already"),
        (MemoryCap(fraction=0.95), "72.0 GiB is the most already"),
        (MemoryCap(fraction=2), "72.0 GiB is the most already"),
    ],
)
def test_a_cap_out_of_a_devices_reach_is_refused(cap: MemoryCap, reason: str, allocator: Allocator) -> None:
    """What is held and what another ceiling allows bound it."""
    allocator.fraction = 0.9
    with pytest.raises(TechniqueError, match=reason):
        cap.check(on("cuda:0"))
    assert allocator.seen == []


def test_a_device_without_a_ceiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator without one, and a device without values, are said."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(TechniqueError, match="Got xpu:0, whose allocator has no ceiling"):
        MemoryCap(fraction=0.5).check(on("xpu:0"))
    with pytest.raises(TechniqueError, match="Got meta, which holds no values"):
        MemoryCap(fraction=0.5).check(on("meta"))


@pytest.fixture(name="metal")
def _metal(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for Metal: it recommends 16 GiB, and reads its variables when it is first asked."""
    metal = SimpleNamespace(read=None, fractions=[], held=0)

    def allocated() -> int:
        metal.read = metal.read or (os.environ.get(_HIGH), os.environ.get(_LOW))
        return metal.held

    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * _GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", allocated)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", allocated)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", metal.fractions.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(MetalLimit, "_now", None)
    for name in (_HIGH, _LOW):
        monkeypatch.delenv(name, raising=False)
    return metal


def test_metal_gets_a_fraction_and_what_it_began_with_back(metal: SimpleNamespace) -> None:
    """4 of 16 GiB are a quarter; the default of 1.7 comes back, and within another cap that one."""
    metal.held = _GIB
    with MemoryCap(max_bytes=4 * _GIB).applied(on("mps")), MemoryCap(fraction=0.125).applied(on("mps")):
        pass
    assert metal.fractions == [0.25, 0.125, 0.25, 1.7]


def test_metal_takes_back_what_the_variable_says(
    metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watermark from the environment is the most there is, and comes back; 0 stands for no limit."""
    monkeypatch.setenv(_HIGH, "0.8")
    with pytest.raises(TechniqueError, match=r"12\.8 GiB is the most already"):
        MemoryCap(fraction=0.9).check(on("mps"))
    monkeypatch.setenv(_HIGH, "0.0")
    with MemoryCap(fraction=0.9).applied(on("mps")):
        pass
    assert metal.fractions == [pytest.approx(0.9, abs=1e-9), 0.0]  # a whole number of bytes


@pytest.mark.parametrize(
    ("fraction", "low", "expected"),
    [(0.8, None, ("0.8", "0.8")), (1.5, None, ("1.5", "1.4")), (0.8, "0.3", ("0.8", "0.3"))],
)
def test_both_watermarks_are_set_together(
    fraction: float,
    low: str | None,
    expected: tuple[str, str],
    metal: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The low one is never above the high one, and both are there when torch reads them."""
    monkeypatch.setenv(_HIGH, "0")  # so that what is set is taken back at the end of the test
    monkeypatch.setenv(_LOW, "0") if low is None else monkeypatch.setenv(_LOW, low)
    if low is None:
        del os.environ[_LOW]
    MemoryCap(fraction=fraction).set_watermarks()
    assert metal.read == expected


def test_watermarks_after_the_first_tensor_are_too_late(metal: SimpleNamespace) -> None:
    """Torch has read them, which is said, and the environment is as it was."""
    metal.held = 4096
    with pytest.raises(TechniqueError, match="Got 4096 bytes there already"):
        MemoryCap(fraction=0.8).set_watermarks()
    assert _HIGH not in os.environ
    assert _LOW not in os.environ


def test_watermarks_need_metal_and_a_fraction(
    metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap in bytes has none, and neither has another machine."""
    with pytest.raises(TechniqueError, match="Got max_bytes=5"):
        MemoryCap(max_bytes=5).set_watermarks()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(TechniqueError, match="no mps"):
        MemoryCap(fraction=0.8).set_watermarks()


@pytest.mark.parametrize("text", ["much", "-1", "3", "nan"])
def test_a_watermark_that_is_none_is_said(
    text: str, metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch would refuse at the first tensor is refused with its name."""
    monkeypatch.setenv(_LOW, text)
    with pytest.raises(TechniqueError, match=_LOW):
        MemoryCap(fraction=0.8).set_watermarks()


@on_linux
@pytest.mark.parametrize("ub_size", [None, 1, 3])
def test_gradients_under_a_cap_are_those_of_plain_pytorch(ub_size: int | None) -> None:
    """Two steps of AdamW under a cap are those without one, bit for bit."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    found = []
    for cap in (None, MemoryCap(max_bytes=data_bytes() + 2 * _GIB)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        entered = cap.applied(Setting.of(model)) if cap else None
        found.append(two_steps(model, x, y, entered, ub_size))
    for expected, got in zip(*found, strict=True):
        assert_equal(expected, got)


@on_linux
def test_a_killed_process_leaves_no_limit_behind() -> None:
    """The limit is one of the process: it ends with it."""
    before = soft_limit()
    program = (
        "import os, torch\n"
        "from anybatch.techniques import MemoryCap, Setting\n"
        "cap = MemoryCap(fraction=0.9).applied(Setting(torch.nn.Identity()))\n"
        "cap.__enter__(); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert soft_limit() == before
    assert DataLimit().most_bytes() > 0
