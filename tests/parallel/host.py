"""`nn.DataParallel` on the host: torch's own code, with copies where it would go to accelerators."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function


class Scatter(Function):
    """The chunks of a tensor, at most one per device, as `comm.scatter` cuts them."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[int], _sizes: None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(chunk.clone() for chunk in tensor.chunk(len(devices), dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, torch.cat(gradients, ctx.dim)


class Gather(Function):
    """The replicas' outputs behind each other, 0-dim ones as a vector."""

    @staticmethod
    def forward(ctx: Any, _device: int, dim: int, *tensors: Tensor) -> Tensor:
        ctx.dim, ctx.is_scalar = dim, tensors[0].ndim == 0
        tensors = tuple(tensor.reshape(1) for tensor in tensors) if ctx.is_scalar else tensors
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        return torch.cat(tensors, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient.split(ctx.sizes, ctx.dim)
        return None, None, *(part[0] if ctx.is_scalar else part for part in parts)


class Broadcast(Function):
    """A copy of each tensor per device; the gradients of the copies are added."""

    @staticmethod
    def forward(ctx: Any, copies: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tensors = len(tensors)
        return tuple(tensor.clone() for _ in range(copies) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = (gradients[place :: ctx.tensors] for place in range(ctx.tensors))
        return None, *(torch.stack(part).sum(0) for part in parts)


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """Copies for each device; like `comm.broadcast_coalesced`, the first device gets buffers themselves."""
    if not tensors:
        return [[] for _ in devices]
    if detach:
        return [list(tensors), *([tensor.clone() for tensor in tensors] for _ in devices[1:])]
    copies = Broadcast.apply(len(devices), *tensors)
    return [list(copies[index * len(tensors) :][: len(tensors)]) for index in range(len(devices))]


class HostParallel(nn.DataParallel[nn.Module]):
    """An `nn.DataParallel` whose devices are all the host.

    Attributes:
        rows: The rows that each device got, call by call.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        super().__init__(module)
        self.device_ids = list(device_ids)
        self.output_device, self.dim = device_ids[0], 0
        self.src_device_obj = torch.device("cpu")
        self.rows: list[list[int]] = []

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        scattered = super().scatter(inputs, kwargs, device_ids)
        self.rows.append([len(value) for one in scattered[0] for value in one[:1]])
        return scattered

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Runs each replica on a thread of its own; in turn, as they share the host's random state."""
        is_enabled = torch.is_grad_enabled()

        def work(index: int) -> Any:
            with torch.set_grad_enabled(is_enabled):
                return replicas[index](*inputs[index], **kwargs[index])

        outputs = []
        for index in range(len(replicas)):
            with ThreadPoolExecutor(1) as thread:
                outputs.append(thread.submit(work, index).result())
        return outputs


def put_devices_on_the_host(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """A machine with this many accelerators, all of which are the host."""
    usable = tuple(torch.device("cpu", index) for index in range(devices))
    monkeypatch.setattr("anybatch.memory.device.accelerators", lambda: usable)
    scatter_gather = sys.modules["torch.nn.parallel.scatter_gather"]
    monkeypatch.setattr(scatter_gather, "Scatter", Scatter)
    monkeypatch.setattr(scatter_gather, "Gather", Gather)
    replicate = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", _broadcast)
