"""Tests of `anybatch.memory.watch`."""

import pytest
import torch

from anybatch.memory import watch
from anybatch.memory.state import memory_of
from anybatch.memory.watch import MemoryWatch

CPU = torch.device("cpu")


def test_live_bytes_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the limits, what is in use is still read anew."""
    times_s = iter([0.0, 0.1, 0.2])
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(times_s))
    looks = []
    monkeypatch.setattr(watch, "memory_of", lambda device: looks.append(device) or memory_of(device))
    reader = MemoryWatch(CPU)
    before = reader.read().live.amount_bytes
    block = torch.ones(64 << 18)
    after = reader.read().live.amount_bytes
    assert before is not None
    assert after is not None
    assert after - before > 56 << 20
    del block
    reader.read()
    assert len(looks) == 1


def test_limits_are_looked_up_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that others change is seen a second later."""
    times_s = iter([0.0, 0.9, 1.1])
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(times_s))
    looks = []
    monkeypatch.setattr(watch, "memory_of", lambda device: looks.append(device) or memory_of(device))
    reader = MemoryWatch(CPU)
    for _ in range(3):
        reader.read()
    assert len(looks) == 2
