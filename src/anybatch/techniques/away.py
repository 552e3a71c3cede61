"""Tensors that autograd saves, kept elsewhere until backward asks for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter


class Place(ABC):
    """Where the values of one tensor are."""

    @abstractmethod
    def get(self) -> Tensor:
        """The values, one after another, where the tensor was."""


class Keeper(ABC):
    """Keeps values of one device elsewhere."""

    @abstractmethod
    def put(self, values: Tensor) -> Place:
        """Copies values that lie one after another; their memory is not needed any more."""


@final
@dataclass(frozen=True, eq=False)
class Away:
    """What autograd holds in place of a tensor."""

    place: Place
    shape: torch.Size
    stride: tuple[int, ...]


@final
class SavedElsewhere:
    """Hooks for what autograd saves: large values go to a keeper, each once.

    Parameters and buffers stay where they are, and are saved as themselves: ties stay ties.
    """

    def __init__(self, keeper: Keeper, device: torch.device, min_bytes: int, own: Iterable[Tensor]) -> None:
        self._keeper = keeper
        self._device = device
        self._min_bytes = min_bytes
        self._own = {_address(tensor) for tensor in own}
        self._known: WeakValueDictionary[Any, _Kept] = WeakValueDictionary()

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Away:
        if not self._is_plain(tensor) or _address(tensor) in self._own:
            return tensor
        values = tensor.detach()
        if _span(values) > values.numel():
            values = values.contiguous()
        if _span(values) * values.element_size() < self._min_bytes or _is_part_of_a_batch(tensor):
            return tensor
        return Away(self._kept(tensor, values), values.shape, values.stride())

    def _is_plain(self, tensor: Tensor) -> bool:
        # Others stand for something else.
        is_usual = type(tensor) in (Tensor, Parameter, FakeTensor) and tensor.layout == torch.strided
        is_as_stored = is_usual and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        return is_as_stored and tensor.device.type == self._device.type and tensor.numel() > 0

    def _kept(self, tensor: Tensor, values: Tensor) -> _Kept:
        where = (tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        # What was written in between is saved again.
        key = (_address(tensor), tensor._version, *where)
        known = self._known.get(key)
        if known is None:
            flat = values.as_strided((_span(values),), (1,))
            place = _Nowhere(flat) if isinstance(flat, FakeTensor) else self._keeper.put(flat)
            known = self._known[key] = _Kept(place, tensor)
        return known


@final
class _Kept(Place):
    """A place, and a hold on the name of the memory it came from: no other memory gets its address."""

    def __init__(self, place: Place, tensor: Tensor) -> None:
        self._place = place
        self._came_from = _hold_address(tensor.untyped_storage())

    def get(self) -> Tensor:
        return self._place.get()


@final
class _Nowhere(Place):
    """The place of a fake's values, which are none: what is foreseen on fakes is what a real run will use."""

    def __init__(self, values: FakeTensor) -> None:
        self._mode = values.fake_mode
        self._length, self._dtype, self._device = values.numel(), values.dtype, values.device

    def get(self) -> Tensor:
        with self._mode:
            return torch.empty(self._length, dtype=self._dtype, device=self._device)


def _unpack(packed: Tensor | Away) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.place.get().as_strided(packed.shape, packed.stride)


def _span(tensor: Tensor) -> int:
    """From the first of its values to the last, how many there are in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_part_of_a_batch(tensor: Tensor) -> bool:
    """Is it a slice of something larger, that no gradient goes to? Whoever has that keeps all of it."""
    is_data = tensor.is_leaf and not tensor.requires_grad
    return is_data and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _hold_address(storage: torch.UntypedStorage) -> object:
    hold: Callable[[torch.UntypedStorage], object] = StorageWeakRef
    return hold(storage)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
