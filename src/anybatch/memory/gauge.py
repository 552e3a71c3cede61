"""Reading what this process holds on a device, in the way in which the limit that binds it counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch

from anybatch.memory.device import MemoryKind, memory_kind
from anybatch.memory.limit import binding_limit
from anybatch.memory.process import (
    Currency,
    HighWater,
    HostCounter,
    Touched,
    high_water,
    live_of,
    read_status_of,
)

__all__ = [
    "AllocatorGauge",
    "Gauge",
    "HostGauge",
    "MetalGauge",
    "gauge_of",
]


class Gauge(ABC):
    """Reads one device, in one currency, as often as is asked; it resets nothing.

    Attributes:
        source: Who says what `live_bytes` is.
    """

    source: str

    @abstractmethod
    def live_bytes(self) -> int:
        """What this process holds now."""

    @abstractmethod
    def high_water(self) -> HighWater | None:
        """The most that it has held so far; None where nobody keeps that."""

    def glance(self) -> tuple[int, HighWater | None]:
        """Both at once, where that costs less."""
        return self.live_bytes(), self.high_water()

    def touched(self) -> Touched | None:
        """What the process has written to; None where that is not this device's memory, or nobody tells."""
        return None


@final
class HostGauge(Gauge):
    """The host's memory, as the operating system counts this process."""

    def __init__(self, currency: Currency) -> None:
        self.currency = currency
        self.source = currency.value
        self._count = HostCounter(currency)

    def live_bytes(self) -> int:
        return self._count()

    def high_water(self) -> HighWater | None:
        return high_water(self.currency)

    def touched(self) -> Touched | None:
        return Touched.read()

    def glance(self) -> tuple[int, HighWater | None]:
        status = read_status_of(self.currency)
        live_bytes = live_of(status, self.currency) if status else self._count()
        return live_bytes, high_water(self.currency, status)


@final
class AllocatorGauge(Gauge):
    """An accelerator whose memory torch's caching allocator gives out: what tensors hold of it."""

    source = "torch.accelerator.memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def live_bytes(self) -> int:
        return torch.accelerator.memory.memory_allocated(self.device)

    def high_water(self) -> HighWater | None:
        most_bytes = torch.accelerator.memory.max_memory_allocated(self.device)
        return HighWater(most_bytes, most_bytes, "torch.accelerator.max_memory_allocated")

    def glance(self) -> tuple[int, HighWater | None]:
        counts = torch.accelerator.memory.memory_stats(self.device)
        most_bytes = counts.get("allocated_bytes.all.peak", 0)
        most = HighWater(most_bytes, most_bytes, "torch.accelerator.max_memory_allocated")
        return counts.get("allocated_bytes.all.current", 0), most


@final
class MetalGauge(Gauge):
    """Apple's Metal: what the driver holds, which is what its limit counts. Caches are part of it."""

    source = "torch.mps.driver_allocated_memory"

    def live_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def high_water(self) -> HighWater | None:
        return None


def gauge_of(device: torch.device) -> Gauge:
    """A gauge of the device, in the currency of the limit that binds this process there, now.

    Raises:
        ValueError: The device holds no values.
    """
    kind = memory_kind(device)
    if kind is MemoryKind.HOST:
        return HostGauge(binding_limit().currency)
    if kind is MemoryKind.METAL:
        return MetalGauge()
    if kind is MemoryKind.CACHED:
        return AllocatorGauge(device)
    raise ValueError(f"A device must hold values to hold memory. Got {str(device)!r}. Pass another device.")
