"""Values of an accelerator's tensors in page-locked memory of the host, copied beside its work.

Backward asks in the reverse order, so the values before those asked for are on their way already::

    computing   forward ...  | backward of 3 | backward of 2 | backward of 1
    copying     out 1  2  3  | in 3   2      |       1       |
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from anybatch.errors import TechniqueError
from anybatch.memory.copies import CopyStream, copy_stream
from anybatch.memory.device import copies_asynchronously
from anybatch.techniques.away import Keeper, Place


@final
class HostMemory(Keeper):
    """Keeps the values of one forward run in the host's memory.

    Raises:
        TechniqueError: The device's work is being captured into a graph, of which copies can't be part.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = copy_stream(device)
        self.places: list[weakref.ref[_OnHost]] = []
        if self.stream is None and copies_asynchronously(device):
            raise TechniqueError(
                "`Offload`: values are copied beside the device's work. Got work that is being captured into "
                "a graph. Capture without Offload."
            )

    def put(self, values: Tensor) -> Place:
        host = page_locked(values) if self.stream is not None else torch.empty_like(values, device="cpu")
        self._copy(host, values)
        place = _OnHost(self, len(self.places), host)
        self.places.append(weakref.ref(place))
        return place

    def _copy(self, host: Tensor, values: Tensor) -> None:
        if self.stream is None:
            host.copy_(values)
            return
        computed = torch.accelerator.current_stream(self.device).record_event()
        with self.stream.entered():
            copying = torch.accelerator.current_stream(self.device)
            copying.wait_event(computed)
            host.copy_(values, non_blocking=True)
            # The memory of the values is given away when the copy has been made, not before.
            values.record_stream(copying)

    def before(self, position: int) -> _OnHost | None:
        """The values that were put before, and that somebody may still ask for."""
        for at in range(position - 1, -1, -1):
            place = self.places[at]()
            if place is not None:
                return place
        return None


@final
@dataclass(eq=False)
class _OnHost(Place):
    keeper: HostMemory
    position: int
    host: Tensor
    _sent: tuple[Tensor, Any] | None = field(default=None, repr=False)

    def get(self) -> Tensor:
        stream = self.keeper.stream
        if stream is None:
            return self.host.to(self.keeper.device)
        values, mark = self.send(stream)
        self._sent = None
        before = self.keeper.before(self.position)
        if before is not None:
            before.send(stream)
        stream.hand_over(mark, [values])
        return values

    def send(self, stream: CopyStream) -> tuple[Tensor, Any]:
        """Begins the copy back, where it has not begun yet."""
        if self._sent is None:
            with stream.entered():
                self._sent = stream.send(self.host), stream.mark()
        return self._sent


def page_locked(values: Tensor) -> Tensor:
    """Memory of the host, as large as the values, that a device can write to while the host goes on."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
