"""Who holds this process to how much of a device's memory, and how that is changed and put back."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, final

import psutil
import torch

from anybatch.errors import TechniqueError
from anybatch.memory.cgroup import group_limits
from anybatch.memory.device import MemoryKind, memory_kind, with_index
from anybatch.memory.limit import can_limit_growth, can_map
from anybatch.memory.process import data_bytes
from anybatch.memory.reading import in_words
from anybatch.techniques.watermarks import HIGHEST, high_watermark

_PROBE_BYTES = 1 << 20


class Ceiling(ABC):
    """The most that this process may hold of one device's memory."""

    def unusable(self) -> str | None:
        """Why it can't be lowered here; None where it can."""
        return None

    @abstractmethod
    def total_bytes(self) -> int:
        """The memory that a fraction is a part of."""

    @abstractmethod
    def held_bytes(self) -> int:
        """What counts under the ceiling now."""

    def most_bytes(self) -> int:
        """The highest ceiling that changes anything."""
        return self.total_bytes()

    @abstractmethod
    def lower(self, most_bytes: int) -> float:
        """Sets the ceiling.

        Returns:
            What `put_back` takes.
        """

    @abstractmethod
    def put_back(self, before: float) -> None:
        """Sets the ceiling that there was."""


def ceiling_of(device: torch.device) -> Ceiling:
    """The ceiling on a device's memory."""
    kind = memory_kind(device)
    if kind is MemoryKind.HOST:
        return DataLimit()
    if kind is MemoryKind.METAL:
        return MetalLimit()
    return AllocatorLimit(device) if kind is MemoryKind.CACHED else NoMemory()


@final
class DataLimit(Ceiling):
    """The operating system's limit on the data of a process, on Linux."""

    def unusable(self) -> str | None:
        return (
            None if can_limit_growth() else f"and only Linux counts all data of a process, not {sys.platform}"
        )

    def total_bytes(self) -> int:
        return min([psutil.virtual_memory().total, *(group.limit_bytes for group in group_limits())])

    def held_bytes(self) -> int:
        return data_bytes()

    def most_bytes(self) -> int:
        soft_bytes = _soft_and_hard()[0]
        return self.total_bytes() if soft_bytes < 0 else min(self.total_bytes(), soft_bytes)

    def lower(self, most_bytes: int) -> float:
        before = _soft_and_hard()[0]
        _set_soft(most_bytes)
        if can_map(most_bytes - data_bytes() + _PROBE_BYTES):
            _set_soft(before)
            raise TechniqueError(
                f"`MemoryCap`: the system must hold the process to RLIMIT_DATA. Got one that maps more than "
                f"{in_words(most_bytes)} all the same. Leave it out, or use a control group."
            )
        return before

    def put_back(self, before: float) -> None:
        _set_soft(int(before))


class FractionLimit(Ceiling):
    """A ceiling that an allocator takes as a part of its device's memory."""

    def lower(self, most_bytes: int) -> float:
        before = self._fraction()
        self._set(most_bytes / self.total_bytes())
        return before

    def put_back(self, before: float) -> None:
        self._set(before)

    @abstractmethod
    def _fraction(self) -> float:
        """The part in force."""

    @abstractmethod
    def _set(self, fraction: float) -> None:
        """Puts another part in force."""


@final
class AllocatorLimit(FractionLimit):
    """The part of a device's memory that torch's caching allocator may take."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device

    def unusable(self) -> str | None:
        names = ("set_per_process_memory_fraction", "get_per_process_memory_fraction")
        return (
            None if all(hasattr(self._module, name) for name in names) else "whose allocator has no ceiling"
        )

    def total_bytes(self) -> int:
        return int(self._module.get_device_properties(with_index(self._device)).total_memory)

    def held_bytes(self) -> int:
        return int(self._module.memory_reserved(with_index(self._device)))

    def most_bytes(self) -> int:
        return int(self.total_bytes() * self._fraction())

    def _fraction(self) -> float:
        return float(self._module.get_per_process_memory_fraction(with_index(self._device)))

    def _set(self, fraction: float) -> None:
        self._module.set_per_process_memory_fraction(fraction, with_index(self._device))


@final
class MetalLimit(FractionLimit):
    """The high watermark of Metal's allocator, of which torch tells only how it began."""

    _now: float | None = None

    def total_bytes(self) -> int:
        return torch.mps.recommended_max_memory()

    def held_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def most_bytes(self) -> int:
        return int(self.total_bytes() * (self._fraction() or HIGHEST))

    def _fraction(self) -> float:
        return high_watermark() if MetalLimit._now is None else MetalLimit._now

    def _set(self, fraction: float) -> None:
        torch.mps.set_per_process_memory_fraction(fraction)
        MetalLimit._now = fraction


@final
class NoMemory(Ceiling):
    """That of a device without values."""

    def unusable(self) -> str | None:
        return "which holds no values"

    def total_bytes(self) -> int:
        return 0

    def held_bytes(self) -> int:
        return 0

    def lower(self, most_bytes: int) -> float:
        raise NotImplementedError

    def put_back(self, before: float) -> None:
        raise NotImplementedError


def _soft_and_hard() -> tuple[int, int]:
    """The limits on data; negative where there is none."""
    assert sys.platform == "linux"
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)


def _set_soft(soft_bytes: int) -> None:
    assert sys.platform == "linux"
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, _soft_and_hard()[1]))
