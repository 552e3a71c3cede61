"""The devices of torch behind one door: which there are, what they copy, what random state they hold.

Rule 5: no other file names a kind of device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import Tensor

__all__ = [
    "MemoryKind",
    "RandomState",
    "accelerators",
    "as_device",
    "autocast_state",
    "copies_asynchronously",
    "current_device",
    "device_name",
    "device_of",
    "finish",
    "is_accelerator",
    "memory_kind",
    "release",
    "unprepared",
    "widest_float",
    "with_index",
]

_HOST_KINDS = frozenset({"cpu", "meta"})
# On mps a non-blocking copy from pageable memory may be read before it is written, so it is left out.
_ASYNCHRONOUS_KINDS = frozenset({"cuda", "xpu"})


class MemoryKind(Enum):
    """Who counts what a process holds on a device."""

    HOST = "the operating system"
    CACHED = "torch's caching allocator"
    METAL = "Metal's driver"
    NONE = "nobody: it holds no values"


def accelerators() -> tuple[torch.device, ...]:
    """Every accelerator that torch can use here, by index; empty on a machine without one."""
    kind = _accelerator_kind()
    if kind is None:
        return ()
    return tuple(torch.device(kind, index) for index in range(torch.accelerator.device_count()))


def current_device() -> torch.device:
    """The accelerator that is current, or the host where there is none."""
    kind = _accelerator_kind()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has memory, a clock and random state of its own, apart from the host's."""
    return device.type not in _HOST_KINDS


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The device of the first tensor; None where there is no tensor."""
    return next((tensor.device for tensor in tensors), None)


def copies_asynchronously(device: torch.device) -> bool:
    """Whether `tensor.to(device, non_blocking=True)` is safe, and overlaps with the host's work."""
    return device.type in _ASYNCHRONOUS_KINDS


def as_device(value: str | int | torch.device | None) -> torch.device | None:
    """The device that a user's argument names, known to be usable on this machine.

    Args:
        value: A device, its name (`"cuda:1"`), the index of an accelerator, or None for "not said".

    Returns:
        The device, or None for None.

    Raises:
        ValueError: torch does not know the name, or this machine does not have the device.
        TypeError: The value is none of these kinds.
    """
    if value is None:
        return None
    device = _named_device(value)
    if is_accelerator(device):
        _check_available(device, value)
    return device


def finish(device: torch.device) -> None:
    """Waits until a device has done all that it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def release(device: torch.device | None) -> None:
    """Frees what a failed attempt has left: what only a cycle of references holds, and cached blocks."""
    gc.collect()
    if device is not None and is_accelerator(device):
        torch.accelerator.empty_cache()


@contextmanager
def unprepared(device: torch.device | None) -> Iterator[None]:
    """A context in which a host's operators prepare, and keep, no kernels for each size that they meet.

    oneDNN keeps some MiB per size and network (38 MiB for a ResNet). Sizes that come once are not worth that.
    """
    if device is not None and is_accelerator(device):
        yield
        return
    # `torch.backends.mkldnn.flags` sets more, and warns of it (torch 2.13). NNPACK would take oneDNN's place
    # from 16 rows on, with another rounding than for fewer.
    enabled = torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_nnpack_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled[0])
        torch._C._set_nnpack_enabled(enabled[1])


def _named_device(value: str | int | torch.device) -> torch.device:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _accelerator_at(value)
    if not isinstance(value, str):
        raise TypeError(
            f"`device`: a device is a torch.device, its name or an accelerator's index. "
            f'Got {value!r} ({type(value).__name__}). Pass "cpu", for example.'
        )
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f'`device`: the name must be one that torch knows. Got {value!r}. Pass "cpu" or "cuda:0".'
        ) from error


def _accelerator_at(index: int) -> torch.device:
    usable = accelerators()
    if not 0 <= index < len(usable):
        raise ValueError(
            f"`device`: an int is the index of an accelerator. Got {index} and torch can use "
            f'{_listed(usable)} here. Pass one of these, or "cpu".'
        )
    return usable[index]


def _check_available(device: torch.device, value: str | int | torch.device) -> None:
    usable = accelerators()
    same_kind = [each for each in usable if each.type == device.type]
    if not same_kind or (device.index is not None and device not in same_kind):
        raise ValueError(
            f"`device`: the device must be usable on this machine. Got {str(value)!r} and torch can use "
            f'{_listed(usable)} here. Pass one of these, or "cpu".'
        )


def _listed(devices: tuple[torch.device, ...]) -> str:
    return ", ".join(map(str, devices)) or "no accelerator"


def _accelerator_kind() -> str | None:
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return None if current is None else current.type


def device_name(device: torch.device) -> str:
    """What the maker calls the device, or its kind where torch can't tell."""
    read_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(read_name(device)) if read_name is not None else device.type


def memory_kind(device: torch.device) -> MemoryKind:
    """How the device's memory is counted."""
    if device.type == "meta":
        return MemoryKind.NONE
    if device.type == "mps":
        return MemoryKind.METAL
    return MemoryKind.CACHED if is_accelerator(device) else MemoryKind.HOST


@final
@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of torch's default random generators: the host's and those of some accelerators.

    Two states are equal when they cover the same devices and every generator is in the same state.

    Attributes:
        host: State of the host's generator, uint8.
        accelerators: State of each accelerator's generator, uint8.
    """

    host: Tensor
    accelerators: dict[torch.device, Tensor]

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> RandomState:
        """Copies the host's state and that of the accelerators among `devices`."""
        wanted = {with_index(device) for device in devices if is_accelerator(device)}
        return cls(torch.get_rng_state(), {device: _generator_state(device) for device in wanted})

    def restore(self) -> None:
        """Puts every captured generator back where it was."""
        torch.set_rng_state(self.host)
        for device, state in self.accelerators.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return (
            torch.equal(self.host, other.host)
            and self.accelerators.keys() == other.accelerators.keys()
            and all(
                torch.equal(state, other.accelerators[device]) for device, state in self.accelerators.items()
            )
        )


def with_index(device: torch.device) -> torch.device:
    """The device with its index, so that a later change of the current device can't redirect it."""
    if device.index is not None or not is_accelerator(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _generator_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def autocast_state(device: torch.device | None) -> tuple[bool, torch.dtype]:
    """Is autocast on for a device, and for which dtype? The host's where it has none of its own."""
    has_autocast = device is not None and torch.amp.is_autocast_available(device.type)
    kind = device.type if device is not None and has_autocast else "cpu"
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def widest_float(device: torch.device) -> torch.dtype:
    """The floating dtype with the most digits that the device has; Metal has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
