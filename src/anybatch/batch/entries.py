"""What has rows: dense tensors and arrays, and what is cut as one. How many rows, and why some have none."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from anybatch.batch.kinds import CannotCut
from anybatch.batch.leaves import SCALARS, Array, has_dim, is_array, is_strided
from anybatch.batch.rows import ANY, IMPOSSIBLE, Possible, exactly
from anybatch.batch.slicers import slicer_of


def is_entry(value: Any) -> bool:
    """Whether `value` is of a kind that has rows by itself."""
    return is_array(value) or slicer_of(value) is not None


def possible_rows(value: Any, dim: int) -> Possible:
    """The numbers of rows that an entry can stand for along `dim`."""
    slicer = slicer_of(value)
    if slicer is not None:
        try:
            return exactly(slicer.rows(value, dim))
        except CannotCut:
            return IMPOSSIBLE
    if not is_strided(value):
        return IMPOSSIBLE
    if value.ndim == 0:
        return ANY
    if not has_dim(value, dim):
        return IMPOSSIBLE
    rows = value.shape[dim]
    return Possible(frozenset({1}), fits_any=True, is_one_row=True) if rows == 1 else exactly(rows)


def why_not(value: Any, path: str, dim: int, is_named: bool) -> str:
    """Why something outside of lists, no open container, can't be part of a mini-batch; empty where it can.

    Args:
        value: An entry, or something of an unknown kind.
        path: Where it is.
        dim: Where its rows would be.
        is_named: Whether it is itself one of the named arguments.
    """
    slicer = slicer_of(value)
    if slicer is not None:
        try:
            slicer.rows(value, dim)
        except CannotCut as reason:
            return f"{path} ({name_of(value)}) {reason}"
        return ""
    if is_array(value):
        return _why_not_array(value, path, dim)
    if isinstance(value, Iterator):
        return (
            f"{path} is an iterator ({name_of(value)}), which can be read only once. Give a list or a tensor."
        )
    if isinstance(value, DataLoader | Dataset):
        return (
            f"{path} is no mini-batch but gives them ({name_of(value)}). Loop over it, and call with each "
            "mini-batch that it gives."
        )
    return why_unknown(value, path) if is_named and not isinstance(value, SCALARS) else ""


def why_unknown(value: Any, path: str) -> str:
    """What to do with an object of an unknown kind."""
    return (
        f"{path} is of a kind that can't be cut ({name_of(value)}). Teach the kind with "
        f"`anybatch.batch.register`, or declare that all rows share it: `batch_dim={{{path!r}: None}}`."
    )


_DENSER = {"strided": "Give `torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged)`."}
_OTHERWISE = "Give a dense tensor, `x.to_sparse_coo()` or a list of tensors."


def _why_not_array(value: Array, path: str, dim: int) -> str:
    if isinstance(value, Tensor) and not is_strided(value):
        layout = str(value.layout).removeprefix("torch.")
        kind = f"nested {layout}" if value.is_nested else layout
        return f"{path} can't be cut in rows ({kind} tensor). {_DENSER.get(layout, _OTHERWISE)}"
    if value.ndim and not has_dim(value, dim):
        return (
            f"{path} has no dim {dim} that could hold rows. Its shape is {tuple(value.shape)}. Declare where "
            f"its rows are: `batch_dim={{{path!r}: 0}}`."
        )
    return ""


def name_of(value: Any) -> str:
    """The class of a value, as its user knows it."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
