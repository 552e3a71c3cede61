"""The entries that are no containers: tensors and arrays, which may have rows, scalars, and the rest."""

import enum
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.rows import ANY, IMPOSSIBLE, Possible, exactly

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
    return -value.ndim <= dim < value.ndim


def is_strided(value: Array) -> bool:
    """Whether rows can be taken as views; nested and sparse tensors can't."""
    return not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested)


def possible_rows(value: Array, dim: int) -> Possible:
    """The numbers of rows that a tensor or array can stand for along `dim`."""
    if not is_strided(value):
        return IMPOSSIBLE
    if value.ndim == 0:
        return ANY
    if not has_dim(value, dim):
        return IMPOSSIBLE
    rows = value.shape[dim]
    return Possible(frozenset({1}), fits_any=True, is_one_row=True) if rows == 1 else exactly(rows)


def why_not(value: Any, path: str, dim: int, is_named: bool) -> str:
    """Why an entry outside of lists can't be part of a mini-batch; empty where it can.

    Args:
        value: An entry that is no container.
        path: Where it is.
        dim: Where its rows would be.
        is_named: Whether it is itself one of the named arguments.
    """
    if is_array(value):
        return _why_not_array(value, path, dim)
    if isinstance(value, PackedSequence):
        return f"{path} is a PackedSequence, whose rows are interleaved. Pack inside the function."
    if isinstance(value, Iterator):
        return (
            f"{path} is an iterator ({_name(value)}), which can be read only once. Give a list or a tensor."
        )
    if is_named and not isinstance(value, SCALARS):
        return (
            f"{path} is of a kind that can't be cut ({_name(value)}). Teach the kind with "
            f"`anybatch.batch.register`, or declare that all rows share it: `batch_dim={{{path!r}: None}}`."
        )
    return ""


def _why_not_array(value: Array, path: str, dim: int) -> str:
    if isinstance(value, Tensor) and not is_strided(value):
        kind = "nested" if value.is_nested else str(value.layout)
        return f"{path} can't be cut in rows ({kind} tensor). Give a dense tensor or a list of tensors."
    if value.ndim and not has_dim(value, dim):
        return (
            f"{path} has no dim {dim} that could hold rows. Its shape is {tuple(value.shape)}. Declare where "
            f"its rows are: `batch_dim={{{path!r}: 0}}`."
        )
    return ""


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
