"""The memory of a device, again and again: limits are looked up once a second, what is in use each time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import final

import torch

from anybatch.memory.gauge import HostGauge, gauge_of
from anybatch.memory.malloc import reusable_bytes
from anybatch.memory.state import MemoryState, memory_of

__all__ = ["MemoryWatch"]

_LIMITS_LAST_S = 1.0


@final
class MemoryWatch:
    """Reads one device.

    Error: what other processes took or gave back during the last second is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_s = -_LIMITS_LAST_S

    def read(self) -> MemoryState:
        """The memory of the device now."""
        now_s = time.monotonic()
        if now_s - self._read_s >= _LIMITS_LAST_S:
            self._read_s = now_s
            self._gauge = gauge_of(self._device)
            self._state = memory_of(self._device)
            return self._state
        live = replace(self._state.live, amount_bytes=self._gauge.live_bytes())
        freed_bytes = reusable_bytes() if isinstance(self._gauge, HostGauge) else 0
        return replace(self._state, live=live, reusable_bytes=freed_bytes)
