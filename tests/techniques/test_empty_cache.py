"""Emptying caches after steps."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tests.techniques.training import assert_equal, two_steps
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from anybatch.errors import TechniqueError
from anybatch.techniques import EmptyCache, Setting

_MIB = 1 << 20


def on(device: str) -> Setting:
    return Setting(nn.Identity(), None, torch.device(device))


@pytest.mark.parametrize("device", ["cuda:0", "mps", "xpu:0"])
def test_the_cache_of_the_device_is_emptied_after_every_so_many_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `every=3`, steps 3 and 6 of seven empty it."""
    emptied: list[int] = []
    step = 0
    module = SimpleNamespace(empty_cache=lambda: emptied.append(step))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    technique = EmptyCache(every=3)
    technique.check(on(device))
    for step in range(1, 8):
        technique.after_step(on(device), step)
    assert emptied == [3, 6]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_of_the_host_goes_back_to_the_system() -> None:
    """64 MiB in freed pieces that lie below a used one are given back by a step, and not before."""
    program = (
        "import torch\n"
        "from anybatch.memory.process import read_resident\n"
        "from anybatch.techniques import EmptyCache, Setting\n"
        "setting = Setting(torch.nn.Identity())\n"
        "held = lambda: read_resident()[0]\n"
        "pieces = [torch.ones(16 << 10) for _ in range(1024)]\n"
        "last = torch.ones(16 << 10)\n"
        "full = held(); del pieces; freed = held()\n"
        "EmptyCache(every=2).after_step(setting, 1); first = held()\n"
        "EmptyCache(every=2).after_step(setting, 2); second = held()\n"
        "print(full - freed, full - first, full - second)\n"
    )
    # As a fixed size: glibc would map pieces by themselves otherwise, and give each back when it is freed.
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    freed, first, second = (int(each) for each in result.stdout.split())
    assert freed < 4 * _MIB
    assert first < 4 * _MIB
    assert second > 56 * _MIB


@pytest.mark.parametrize("ub_size", [None, 1, 3])
def test_gradients_are_those_of_plain_pytorch(ub_size: int | None) -> None:
    """Two steps of AdamW with a cache emptied in between are those without, bit for bit."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    found = []
    for technique in (None, EmptyCache()):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        hook = None
        if technique is not None:
            setting, steps = Setting.of(model), iter(range(1, 9))
            hook = register_optimizer_step_post_hook(
                lambda *_, use=technique, setting=setting, steps=steps: use.after_step(setting, next(steps))
            )
        try:
            found.append(two_steps(model, x, y, ub_size=ub_size))
        finally:
            if hook is not None:
                hook.remove()
    for expected, got in zip(*found, strict=True):
        assert_equal(expected, got)


def test_a_device_without_values_is_refused() -> None:
    """Nothing is cached where there are no values."""
    with pytest.raises(TechniqueError, match="Got meta, which holds no values"):
        EmptyCache().check(on("meta"))


def test_a_device_that_torch_does_not_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose cache torch can't empty is said (Rule 8)."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(TechniqueError, match="Got xpu:0, whose cache torch does not empty"):
        EmptyCache().check(on("xpu:0"))


def test_another_malloc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory of the host is not glibc's there is nothing to call."""
    monkeypatch.setattr("anybatch.techniques.empty_cache.malloc_setting", lambda: None)
    with pytest.raises(TechniqueError, match="memory is not glibc's"):
        EmptyCache().check(on("cpu"))
