"""Devices that this machine lacks: torch's functions about memory, replaced by ones of the same signature."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from anybatch.memory.gauge import Gauge
from anybatch.memory.process import HighWater


def replace(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, function: Callable[..., Any]
) -> None:
    """Replaces a function of torch by one that takes its very arguments and refuses others."""
    monkeypatch.setattr(module, name, create_autospec(getattr(module, name), side_effect=function))


@dataclass
class Allocator:
    """A device of the kinds cuda and xpu: what its allocator and its driver count."""

    live_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int | None = 0
    total_bytes: int = 0
    fraction: float = 1.0

    def install(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> torch.device:
        """Lets torch tell of it as the second device of this kind, and fail for any other."""
        device = torch.device(kind, 1)
        module, memory = torch.get_device_module(device), torch.accelerator.memory

        def only_of_it(read: Callable[[], Any]) -> Callable[[torch.device], Any]:
            def function(asked: torch.device) -> Any:
                assert asked == device
                return read()

            return function

        replace(monkeypatch, memory, "memory_allocated", only_of_it(lambda: self.live_bytes))
        replace(monkeypatch, memory, "max_memory_allocated", only_of_it(lambda: self.peak_bytes))
        replace(monkeypatch, memory, "memory_stats", only_of_it(self._counts))
        replace(monkeypatch, memory, "memory_reserved", only_of_it(lambda: self.reserved_bytes))
        replace(monkeypatch, module, "mem_get_info", only_of_it(self._info))
        replace(monkeypatch, module, "get_per_process_memory_fraction", only_of_it(lambda: self.fraction))
        replace(monkeypatch, module, "get_device_properties", only_of_it(lambda: self))
        refuse_resets(monkeypatch)
        return device

    @property
    def total_memory(self) -> int:
        return self.total_bytes

    def _counts(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.live_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
        }

    def _info(self) -> tuple[int, int]:
        if self.free_bytes is None:
            raise RuntimeError("The device doesn't support querying the available free memory.")
        return self.free_bytes, self.total_bytes


@dataclass
class Metal:
    """Apple's device: what Metal's driver counts, and what torch's tensors hold of it."""

    driver_bytes: int = 0
    tensor_bytes: int = 0
    recommended_bytes: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> torch.device:
        """Lets torch tell of it."""
        replace(monkeypatch, torch.mps, "driver_allocated_memory", lambda: self.driver_bytes)
        replace(monkeypatch, torch.mps, "current_allocated_memory", lambda: self.tensor_bytes)
        replace(monkeypatch, torch.mps, "recommended_max_memory", lambda: self.recommended_bytes)
        replace(monkeypatch, torch.accelerator.memory, "empty_cache", self._empty_cache)
        monkeypatch.setattr(torch.accelerator, "empty_cache", torch.accelerator.memory.empty_cache)
        monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
        return torch.device("mps")

    def _empty_cache(self) -> None:
        self.driver_bytes = self.tensor_bytes


class Scripted(Gauge):
    """A gauge that a test moves by hand; it tells when it was read from another thread."""

    source = "a script"

    def __init__(self, held_bytes: int, mark_bytes: int | None) -> None:
        self.held_bytes = held_bytes
        self.mark_bytes = mark_bytes
        self._sampled = threading.Event()

    def live_bytes(self) -> int:
        if threading.current_thread() is not threading.main_thread():
            self._sampled.set()
        return self.held_bytes

    def high_water(self) -> HighWater | None:
        return None if self.mark_bytes is None else HighWater(self.mark_bytes, self.mark_bytes, "a mark")

    def wait_for_sample(self) -> None:
        """Returns when a sample was taken that began after now."""
        for _ in range(2):
            self._sampled.clear()
            assert self._sampled.wait(10)


def refuse_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every reset of a counter of torch's fail the test."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a counter of the user's was reset")

    for module in (torch.accelerator.memory, torch.cuda, torch.xpu):
        for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
            replace(monkeypatch, module, name, refuse)
