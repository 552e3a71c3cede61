"""Who holds memory: the parts of a training program, and how many bytes each has on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["Holder", "held_bytes", "is_on", "storages", "tensors_of"]


class Holder(Enum):
    """A part of a training program that holds memory."""

    PARAMETERS = "parameters and buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATIONS = "activations"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    OTHER = "other"


def held_bytes(
    modules: Iterable[Module], optimizers: Iterable[Optimizer], device: torch.device
) -> Mapping[Holder, int]:
    """What parameters, their gradients and the optimizers' state hold on a device, each storage once.

    Args:
        modules: Whose parameters and buffers count.
        optimizers: Whose parameters and state count.
        device: The device.

    Returns:
        Bytes of `PARAMETERS`, `GRADIENTS` and `OPTIMIZER_STATE`.
    """
    seen: set[int] = set()
    return {
        holder: _fresh_bytes(tensors, device, seen)
        for holder, tensors in tensors_of(modules, optimizers).items()
    }


def tensors_of(modules: Iterable[Module], optimizers: Iterable[Optimizer]) -> Mapping[Holder, list[Tensor]]:
    """The tensors of parameters and buffers, gradients and optimizer state."""
    modules, optimizers = list(modules), list(optimizers)
    parameters = [
        *(parameter for module in modules for parameter in module.parameters()),
        *(parameter for each in optimizers for group in each.param_groups for parameter in group["params"]),
    ]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    state = [tensor for each in optimizers for tensor in _tensors(dict(each.state))]
    return {
        Holder.PARAMETERS: [*parameters, *buffers],
        Holder.GRADIENTS: [parameter.grad for parameter in parameters if parameter.grad is not None],
        Holder.OPTIMIZER_STATE: state,
    }


def _tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    """The tensors in an optimizer's state, whose keys are parameters."""
    yield from (leaf for value in state.values() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _fresh_bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on a device that were not seen before."""
    total_bytes = 0
    for tensor in tensors:
        for storage in storages(tensor):
            if storage._cdata not in seen and is_on(storage.device, device):
                seen.add(storage._cdata)
                total_bytes += storage.nbytes()
    return total_bytes


def is_on(here: torch.device, device: torch.device) -> bool:
    """Is it the device, or one of its kind where that has no index?"""
    return here.type == device.type and (device.index is None or here.index == device.index)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor: several where it is sparse, or made of others."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from storages(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    else:
        yield from (part.untyped_storage() for part in _parts(tensor))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors of which one of another layout consists."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
