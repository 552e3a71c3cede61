"""How much each row of an entry holds, for pieces that are balanced by it."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor

from anybatch.batch.containers import container_of
from anybatch.batch.slicers import slicer_of


def row_amounts(value: Any) -> Sequence[int] | None:
    """The elements, or nodes, in each row of something cut as one, or of a list with one element per row.

    Returns:
        One number per row; None where all rows hold the same.
    """
    slicer = slicer_of(value)
    if slicer is not None:
        return None if slicer.sizes is None else slicer.sizes(value)
    return [amount_of(row) for row in value] if isinstance(value, list | tuple) else None


def amount_of(value: Any) -> int:
    """The elements of all tensors and arrays in a row, or the characters of a text."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    container = container_of(value)
    if container is not None:
        return sum(amount_of(child) for _, child in container.children(value))
    return len(value) if isinstance(value, Sized) else 1
