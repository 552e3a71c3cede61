"""What a process holds on a device, and what it may hold: five figures, each with its source."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import torch

from anybatch.memory.device import MemoryKind, memory_kind
from anybatch.memory.gauge import AllocatorGauge, HostGauge, MetalGauge
from anybatch.memory.limit import HostLimit, binding_limit
from anybatch.memory.malloc import reusable_bytes
from anybatch.memory.process import HighWater
from anybatch.memory.reading import Quantity, Reading

__all__ = ["MemoryState", "memory_of"]

_METAL_FRACTION = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"


@final
@dataclass(frozen=True)
class MemoryState:
    """The memory of one device, as this process sees it. All figures count in the same way.

    Attributes:
        device: The device.
        live: What the process holds now.
        peak: The most that it has held so far; None where nobody keeps that.
        reserved: The same as `live`, with what an allocator keeps for later; None where nobody keeps that.
        limit: What the process may hold at all.
        budget: What of the limit is really to be had: `live` and what is free, at most the limit.
        reusable_bytes: What of `live` was freed, and can be used again without asking anybody.
    """

    device: torch.device
    live: Reading
    peak: Reading
    reserved: Reading
    limit: Reading
    budget: Reading
    reusable_bytes: int = 0

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The five figures."""
        return self.live, self.peak, self.reserved, self.limit, self.budget

    @property
    def headroom_bytes(self) -> int | None:
        """What the process can still get; None where nothing can tell."""
        if self.budget.amount_bytes is None or self.live.amount_bytes is None:
            return None
        return max(0, self.budget.amount_bytes - self.live.amount_bytes) + self.reusable_bytes

    def __str__(self) -> str:
        return "\n".join([f"memory of {self.device}", *(f"  {reading}" for reading in self.readings)])


def memory_of(device: torch.device) -> MemoryState:
    """The memory of a device now. Nobody's peak counters are reset.

    On a host, the limit under which the least is still to be had decides how everything is counted: data
    under RLIMIT_DATA, resident memory under that of a control group or of the machine.
    """
    kind = memory_kind(device)
    if kind is MemoryKind.HOST:
        return _host_state(device, binding_limit())
    if kind is MemoryKind.METAL:
        return _metal_state(device)
    if kind is MemoryKind.CACHED:
        return _allocator_state(device)
    nobody = (None, kind.value)
    return _state(device, nobody, None, nobody, nobody, None)


_Figure = tuple[int | None, str]


def _state(
    device: torch.device,
    live: _Figure,
    peak: HighWater | None,
    reserved: _Figure,
    limit: _Figure,
    free_bytes: int | None,
    reusable_bytes: int = 0,
) -> MemoryState:
    return MemoryState(
        device,
        Reading(Quantity.LIVE, *live),
        _peak(peak),
        Reading(Quantity.RESERVED, *reserved),
        Reading(Quantity.LIMIT, *limit),
        _budget(live[0], limit[0], free_bytes),
        reusable_bytes,
    )


def _peak(high_water: HighWater | None) -> Reading:
    if high_water is None:
        return Reading(Quantity.PEAK, None, "nobody keeps it")
    return Reading(Quantity.PEAK, high_water.amount_bytes, high_water.source)


def _budget(held_bytes: int | None, limit_bytes: int | None, free_bytes: int | None) -> Reading:
    if held_bytes is None or free_bytes is None:
        return Reading(Quantity.BUDGET, limit_bytes, "the limit: nobody tells what is free")
    to_be_had_bytes = held_bytes + free_bytes
    if limit_bytes is not None and limit_bytes <= to_be_had_bytes:
        return Reading(Quantity.BUDGET, limit_bytes, "the limit")
    return Reading(Quantity.BUDGET, to_be_had_bytes, "in use and free")


def _host_state(device: torch.device, limit: HostLimit) -> MemoryState:
    gauge = HostGauge(limit.currency)
    return _state(
        device,
        (gauge.live_bytes(), gauge.source),
        gauge.high_water(),
        (None, "not counted on a host"),
        (limit.amount_bytes, limit.source),
        limit.free_bytes,
        reusable_bytes(),
    )


def _allocator_state(device: torch.device) -> MemoryState:
    gauge = AllocatorGauge(device)
    live_bytes = gauge.live_bytes()
    reserved_bytes = torch.accelerator.memory.memory_reserved(device)
    unclaimed_bytes, total_bytes = _driver_bytes(device)
    fraction = _allocator_fraction(device)
    of_the_driver = "memory of the device (driver)"
    source = of_the_driver if fraction == 1 else f"{fraction:g} of the {of_the_driver}"
    # What the allocator keeps for later is free to this process, though not to others.
    free_bytes = None if unclaimed_bytes is None else unclaimed_bytes + reserved_bytes - live_bytes
    return _state(
        device,
        (live_bytes, gauge.source),
        gauge.high_water(),
        (reserved_bytes, "torch.accelerator.memory_reserved"),
        (int(total_bytes * fraction), source),
        free_bytes,
    )


def _driver_bytes(device: torch.device) -> tuple[int | None, int]:
    """What no process holds of a device, None where its driver can't tell, and what it has at all."""
    module = torch.get_device_module(device)
    try:
        free_bytes, total_bytes = module.mem_get_info(device)
    except RuntimeError:  # some of Intel's devices don't tell what is free
        return None, int(module.get_device_properties(device).total_memory)
    return int(free_bytes), int(total_bytes)


def _allocator_fraction(device: torch.device) -> float:
    """The part of the device that the caller lets this process have."""
    read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))


def _metal_state(device: torch.device) -> MemoryState:
    gauge = MetalGauge()
    held = (gauge.live_bytes(), gauge.source)
    recommended_bytes = torch.mps.recommended_max_memory()
    fraction = _metal_fraction()
    source = "torch.mps.recommended_max_memory"
    limit = (int(recommended_bytes * fraction), source if fraction == 1 else f"{fraction:g} of {source}")
    return _state(device, held, gauge.high_water(), held, limit, max(0, limit[0] - held[0]))


def _metal_fraction() -> float:
    """The part of what Metal recommends that this process may have. Above 1 the machine would swap.

    torch has no call that tells what `torch.mps.set_per_process_memory_fraction` was given, so only the
    environment variable is known, which torch reads at the first allocation. A ratio of 0 means no limit.
    """
    ratio = float(os.environ.get(_METAL_FRACTION, "") or 0)
    return min(ratio, 1.0) if ratio > 0 else 1.0
