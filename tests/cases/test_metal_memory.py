"""Metal's memory: the driver's figure against Metal's limit, never the machine's (pytorch/pytorch#96814).

Reported: tensors stay flat while the driver holds more and more (caches, a graph per shape); a watermark of
0 makes the machine swap instead of raising; the machine's memory taken for Metal's limit.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import psutil
import pytest
import torch

from anybatch.memory.device import release
from anybatch.memory.gauge import gauge_of
from anybatch.memory.state import memory_of

GIB = 1 << 30
RATIO = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
METAL = torch.device("mps")


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for Apple's device that recommends 10 GiB, by functions of the signatures of torch's own."""
    machine = SimpleNamespace(driver_bytes=GIB, tensor_bytes=GIB)
    answers = {
        "driver_allocated_memory": lambda: machine.driver_bytes,
        "current_allocated_memory": lambda: machine.tensor_bytes,
        "recommended_max_memory": lambda: 10 * GIB,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.mps, name, create_autospec(getattr(torch.mps, name), side_effect=answer))

    def empty_cache() -> None:
        machine.driver_bytes = machine.tensor_bytes

    monkeypatch.setattr(torch.accelerator, "empty_cache", empty_cache)
    monkeypatch.delenv(RATIO, raising=False)
    return machine


def test_growing_driver_memory_is_seen(metal: SimpleNamespace) -> None:
    """A cache that grows while the tensors stay as they are takes memory away, and is given back."""
    metal.driver_bytes = 2 * GIB
    assert memory_of(METAL).headroom_bytes == 8 * GIB
    metal.driver_bytes = 7 * GIB
    assert gauge_of(METAL).live_bytes() == 7 * GIB
    assert memory_of(METAL).headroom_bytes == 3 * GIB
    release(METAL)
    assert memory_of(METAL).headroom_bytes == 9 * GIB


@pytest.mark.parametrize(
    ("ratio", "expected_bytes"),
    [("0.5", 5 * GIB), ("1.0", 10 * GIB), ("1.7", 10 * GIB), ("0.0", 10 * GIB), ("", 10 * GIB)],
)
def test_limit_is_the_fraction_of_what_metal_recommends(
    ratio: str, expected_bytes: int, metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's ratio lowers the limit; above 1, or 0 for none, the machine would swap: 1 it is."""
    monkeypatch.setenv(RATIO, ratio)
    memory = memory_of(METAL)
    assert memory.limit.amount_bytes == memory.budget.amount_bytes == expected_bytes
    assert "recommended_max_memory" in memory.limit.source


def test_memory_of_the_machine_is_not_asked(metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's memory is not Metal's limit, and is not even looked at."""

    def refuse() -> None:
        raise AssertionError("the machine's memory was taken for Metal's")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert memory_of(METAL).headroom_bytes == 9 * GIB


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs Apple's Metal")
def test_on_metal() -> None:
    """A tensor of 256 MiB on a real device raises what the driver holds by at least as much."""
    begin_bytes = gauge_of(METAL).live_bytes()
    block = torch.ones(64 << 20, dtype=torch.float32, device=METAL)
    torch.mps.synchronize()
    assert gauge_of(METAL).live_bytes() - begin_bytes >= block.nbytes
    assert (memory_of(METAL).limit.amount_bytes or 0) <= torch.mps.recommended_max_memory()
