"""Tensors and arrays, their values and what autograd keeps with them, as they were.

Values are compared and restored themselves, not by torch's version counters: a change through `.data`
counts no version.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch._verify.kept import Kept


@final
class KeptTensor(Kept):
    """The values of a tensor, and the memory in which they are."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name)
        self.tensor = tensor
        self._memory = tensor.data
        self._value = tensor.data.clone()

    def changes(self) -> list[str]:
        return [] if _same_bits(self.tensor.data, self._value) else [self.name]

    def restore(self) -> None:
        if not _is_same_memory(self.tensor.data, self._memory):
            self.tensor.data = self._memory
        if not _same_bits(self._memory, self._value):
            # Through `.data`, so that no version is counted: a graph of the caller's may have saved it.
            self._memory.copy_(self._value)


def can_keep(tensor: Tensor) -> bool:
    """Are its values in memory that can be written to?"""
    if is_lazy(tensor):
        return False
    is_plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_plain and not (tensor.is_inference() or tensor.is_meta)


def _is_same_memory(left: Tensor, right: Tensor) -> bool:
    return (left.data_ptr(), left.dtype, left.shape, left.stride()) == (
        right.data_ptr(),
        right.dtype,
        right.shape,
        right.stride(),
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


@final
class KeptLeaf(Kept):
    """What autograd keeps with a tensor: whether it requires grad, its gradient, its hooks.

    The tensor is held weakly: one that the function makes for itself dies with its piece (Rule 4).
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name)
        self._reference = weakref.ref(tensor)
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        self._hooks = [dict(hooks or {}) for hooks in _hooks_of(tensor)]

    @property
    def tensor(self) -> Tensor | None:
        return self._reference()

    @property
    def gets_gradient(self) -> bool:
        """Is it alive, and may a backward accumulate into it?"""
        return self.tensor is not None and self.tensor.is_leaf and self.tensor.requires_grad

    def strip(self) -> None:
        """Takes the gradient and the hooks away, until all is put back."""
        if self.tensor is not None:
            if self.tensor.is_leaf:
                self.tensor.grad = None
            for hooks in _hooks_of(self.tensor):
                if hooks:
                    hooks.clear()

    def changes(self) -> list[str]:
        tensor = self.tensor
        if tensor is None:
            return []
        is_same_gradient = not tensor.is_leaf or tensor.grad is self._grad
        is_same = tensor.requires_grad == self._requires_grad and is_same_gradient
        hooks = [dict(hooks or {}) for hooks in _hooks_of(tensor)]
        return [] if is_same and hooks == self._hooks else [self.name]

    def restore(self) -> None:
        tensor = self.tensor
        if tensor is None:
            return
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.is_leaf and tensor.grad is not self._grad:
            tensor.grad = self._grad
        for now, before in zip(_hooks_of(tensor), self._hooks, strict=True):
            if now is not None and dict(now) != before:
                now.clear()
                now.update(before)


def _hooks_of(tensor: Tensor) -> tuple[MutableMapping[int, Any] | None, ...]:
    """The dictionaries that autograd calls hooks from: before accumulating, and after."""
    after: Any = tensor._post_accumulate_grad_hooks if tensor.is_leaf else None
    before: Any = tensor._backward_hooks
    return before, after


@final
class KeptArray(Kept):
    """The values of a numpy array."""

    def __init__(self, name: str, array: "np.ndarray[Any, Any]") -> None:
        super().__init__(name)
        self._array = array
        self._value = array.copy()

    def changes(self) -> list[str]:
        return [self.name] if self._array.tobytes() != self._value.tobytes() else []

    def restore(self) -> None:
        if self.changes():
            self._array[...] = self._value
