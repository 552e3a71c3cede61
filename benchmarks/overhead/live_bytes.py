"""The most bytes alive at once during a call: micro-batches on the device, and all else that it makes.

A machine without an accelerator has no device to look at. But torch has a device without memory, `meta`,
whose tensors have sizes and lifetimes like any other. Pieces are sent there by the same code that sends them
to an accelerator, and the function trains with ones of the same shapes in their place. A dispatch mode sees
every tensor that is made, and its storage tells when it dies.
"""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch

FEATURES, CLASSES, UB_SIZE = 128, 10, 32
META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made while it is entered, and their peak, by device."""

    def __init__(self, *existing: Tensor) -> None:
        """Leaves out what was there before, of which views may be made."""
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}
        self.live_bytes: Counter[torch.device] = Counter()
        self.peak_bytes: Counter[torch.device] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), tensor.device)
        return result

    def _count(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.live_bytes[device] += storage.nbytes()
        self.peak_bytes[device] = max(self.peak_bytes[device], self.live_bytes[device])
        weakref.finalize(storage, self._release, storage._cdata, device, storage.nbytes())

    def _release(self, key: int, device: torch.device, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes[device] -= size_bytes


@dataclass(frozen=True)
class InputBytes:
    """The most bytes alive at once in a call.

    Attributes:
        rows: Of the mini-batch.
        ub_size: Of a piece.
        pieces: Their number.
        batch_bytes: The mini-batch on the host; in neither peak.
        inputs_peak_bytes: Pieces on the device.
        others_peak_bytes: Everything else that the call makes: activations, graphs, gradients, results.
    """

    rows: int
    ub_size: int
    pieces: int
    batch_bytes: int
    inputs_peak_bytes: int
    others_peak_bytes: int


def measure_inputs(rows: int) -> InputBytes:
    """Trains one step with a mini-batch of that many rows; the second call of the function is measured."""
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    x, label = torch.randn(rows, FEATURES), torch.randint(CLASSES, (rows,))

    @anybatch.apply(["x", "label"], ub_size=UB_SIZE, device=META)
    def step(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(net(torch.ones(x.shape)), torch.zeros(label.shape, dtype=torch.long))

    step(x=x, label=label)
    net.zero_grad()
    with LiveBytes(x, label, *net.parameters()) as live:
        step(x=x, label=label)
    batch_bytes, peak_bytes = x.nbytes + label.nbytes, live.peak_bytes
    return InputBytes(rows, UB_SIZE, rows // UB_SIZE, batch_bytes, peak_bytes[META], peak_bytes[x.device])
