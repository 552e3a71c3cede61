"""Copies to an accelerator that run while it computes, on a stream of their own."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from anybatch.memory.device import copies_asynchronously


class CopyStream:
    """A second stream of a device, beside the one on which it computes.

    What is made on it belongs to it: before the other stream reads such a tensor it waits, and before the
    tensor's memory is given away this one waits. `hand_over` sees to both.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copying = torch.Stream(device)
        self._computing = torch.accelerator.current_stream(device)

    def entered(self) -> AbstractContextManager[Any]:
        """A context in which the device's work goes to this stream."""
        self._computing = torch.accelerator.current_stream(self.device)
        return self._copying

    def left(self) -> AbstractContextManager[Any]:
        """A context, inside of `entered`, in which work goes to the stream that computes."""
        return self._computing

    def can_send(self, source: Tensor) -> bool:
        """Is it a host tensor that can be page-locked and sent off without waiting?"""
        return source.is_cpu and source.layout == torch.strided and not source.is_nested

    def send(self, source: Tensor) -> Tensor:
        """A copy of a host tensor on the device; the host does not wait for it.

        It goes through page-locked memory, which torch keeps until the copy has been made.
        """
        pinned = source if source.is_pinned() else source.pin_memory()
        return pinned.detach().to(self.device, non_blocking=True)

    def mark(self) -> torch.Event:
        """A mark behind all that was sent so far."""
        return self._copying.record_event()

    def hand_over(self, mark: torch.Event, tensors: Iterable[Tensor]) -> None:
        """Makes tensors that were made before the mark safe to compute with, on the current stream."""
        computing = torch.accelerator.current_stream(self.device)
        computing.wait_event(mark)
        for tensor in tensors:
            if tensor.device == computing.device and tensor.layout == torch.strided:
                tensor.record_stream(computing)


def copy_stream(device: torch.device | None) -> CopyStream | None:
    """A stream for copies to the device; None where they can't run beside its work."""
    if device is None or not copies_asynchronously(device):
        return None
    # What is captured into a graph must stay on the streams that the graph knows.
    is_capturing = torch.accelerator.current_stream(device).is_capturing()
    return None if is_capturing else CopyStream(device)
