"""Nested tensors of the jagged layout: rows of different lengths, one after another in one dense tensor.

Row `i` begins at `offsets[i]`; it ends where the next one begins, or, where there are `lengths`, before that.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anybatch.batch.kinds import CannotCut, Slicer


def is_jagged(value: Tensor) -> bool:
    """Whether it is a nested tensor of the jagged layout."""
    return value.is_nested and value.layout is torch.jagged


def _rows(value: Tensor, dim: int) -> int:
    if dim % value.ndim:
        raise CannotCut(f"is a nested tensor, whose rows are along dim 0. Got dim {dim}. Declare dim 0.")
    return value.shape[0]


def _cut(value: Any, _dim: int, start: int, stop: int) -> Tensor:
    dim = _ragged_dim(value)
    offsets, lengths = value.offsets()[start : stop + 1], value.lengths()
    begin, end = int(offsets[0]), int(offsets[-1])
    values = value.values().narrow(dim, begin, end - begin)
    return _nested(values, offsets - begin, None if lengths is None else lengths[start:stop], dim)


def _sizes(value: Any) -> list[int]:
    lengths = value.lengths()
    found: list[int] = (value.offsets().diff() if lengths is None else lengths).tolist()
    return found


def _join(values: list[Any]) -> Tensor:
    dim = _ragged_dim(values[0])
    ends = accumulate((value.values().shape[dim] for value in values), initial=0)
    offsets = [value.offsets()[:-1] + end for value, end in zip(values, ends, strict=False)]
    offsets.append(offsets[-1].new_tensor([sum(value.values().shape[dim] for value in values)]))
    lengths = [value.lengths() for value in values]
    return _nested(
        torch.cat([value.values() for value in values], dim),
        torch.cat(offsets),
        None if lengths[0] is None else torch.cat(lengths),
        dim,
    )


def _ragged_dim(value: Any) -> int:
    """The dim of the dense values along which the rows lie."""
    dim: int = value._ragged_idx - 1  # torch has no public name for it
    return dim


def _nested(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    held = offsets.diff() if lengths is None else lengths
    # Without them torch pads to the length of all rows together (2.13).
    shortest, longest = (int(bound) for bound in torch.aminmax(held))
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, dim + 1, min_seqlen=shortest, max_seqlen=longest
    )


JAGGED = Slicer(_rows, _cut, _sizes, _join)
