"""How much one row of a mini-batch holds: what its need of memory depends on."""

import math
from collections.abc import Iterator

from anybatch.batch.amounts import amount_of
from anybatch.batch.layout import Layout
from anybatch.batch.parts import Branch, CutAsOne, Part, RowList, Rows, Runs, Whole

# Rows that differ in length have another mean in every mini-batch, which is the same need.
_STEP_RATIO = 1.1


def extent(layout: Layout) -> tuple[int, ...]:
    """Numbers that describe the shape of a row: the dims of tensors, and how much else the rows hold.

    Two mini-batches of one structure have as many of them. Where none is larger, a row needs no more memory.
    """
    return tuple(number for part in layout.parts.values() for number in _extent(part, layout.rows))


def _extent(part: Part, rows: int) -> Iterator[int]:
    if isinstance(part, Branch):
        for child in part.parts:
            yield from _extent(child, rows)
    elif isinstance(part, Rows):
        yield from (size for dim, size in enumerate(part.value.shape) if dim != part.dim)
    elif isinstance(part, Runs):
        yield _rounded_up(part.bounds[-1] / rows)
        yield from part.value.shape[1:]
    elif isinstance(part, RowList | CutAsOne):
        yield _rounded_up(amount_of(part.value) / rows)
    elif isinstance(part, Whole):
        yield _rounded_up(amount_of(part.value))


def _rounded_up(amount: float) -> int:
    """The next of the numbers that lie a tenth apart."""
    return 0 if amount <= 0 else math.ceil(_STEP_RATIO ** math.ceil(math.log(amount, _STEP_RATIO)))
