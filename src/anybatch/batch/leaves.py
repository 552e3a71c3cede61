"""The entries that are no containers: tensors and arrays, which may have rows, scalars, and the rest."""

import enum
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray[Any, Any]

NUMBERS = (int, float, complex, np.number, np.bool_)
SCALARS = (
    *NUMBERS,
    str,
    bytes,
    bytearray,
    type(None),
    enum.Enum,
    np.generic,
    torch.Size,
    torch.dtype,
    torch.device,
)


def is_array(value: Any) -> TypeGuard[Array]:
    """Whether `value` is of a kind that can have rows along a dim."""
    return isinstance(value, Tensor | np.ndarray)


def is_scalar_type(kind: type) -> bool:
    """Whether values of this type pass whole and hold no tensors."""
    return issubclass(kind, SCALARS)


def holds_only_scalars(elements: Iterable[Any]) -> bool:
    """Whether every element is a scalar; cheap for long lists of strings or numbers."""
    return all(map(is_scalar_type, set(map(type, elements))))


def has_dim(value: Array, dim: int) -> bool:
    """Whether it has a dim of this number, counted from the end where it is negative."""
    return -value.ndim <= dim < value.ndim


def is_strided(value: Array) -> bool:
    """Whether it is a dense block, whose rows are views; nested and sparse tensors are none."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)
