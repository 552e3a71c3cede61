"""Rows of different lengths that lie one after another along dim 0, as in the targets of a CTC loss.

Another entry of the batch holds their lengths::

    targets   a a a b c c        target_lengths   3 1 2
"""

from typing import Any

import numpy as np
from torch import Tensor


def read_lengths(value: Any) -> list[int] | None:
    """The lengths that an entry holds, whole numbers from 0 on, one per row; None where it holds others."""
    if isinstance(value, Tensor):
        is_whole = value.ndim == 1 and not (value.is_floating_point() or value.is_complex())
        value = value.tolist() if is_whole else None
    elif isinstance(value, np.ndarray):
        value = value.tolist() if value.ndim == 1 and value.dtype.kind in "iu" else None
    if not isinstance(value, list | tuple) or not all(
        type(length) is int and length >= 0 for length in value
    ):
        return None
    return list(value)
