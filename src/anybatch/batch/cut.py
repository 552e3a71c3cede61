"""Cut a number of rows into micro-batches of nearly equal size."""

from collections.abc import Sequence
from itertools import accumulate


def balanced(rows: int, ub_size: int, amounts: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut `rows` into as few pieces as `ub_size` allows, all of nearly the same size.

    The sizes differ by at most one row, so at most two sizes occur (a compiled function makes at most two
    graphs) and there is no short last piece: a piece of one row occurs only where `rows` or `ub_size` is 1,
    or `ub_size` is 2 and the number of rows odd.

    Args:
        rows: Rows of the mini-batch, at least 1.
        ub_size: The largest number of rows in one piece, at least 1.
        amounts: How much each row holds. The pieces then hold nearly the same, whatever their rows.

    Returns:
        The rows of each piece, largest first unless they are cut by amounts; they add up to `rows`.

    Raises:
        ValueError: `rows` or `ub_size` is less than 1.

    Example:
        >>> balanced(10, 4)
        (4, 3, 3)
        >>> balanced(29, 8)
        (8, 7, 7, 7)
        >>> balanced(6, 4, amounts=[9, 1, 1, 1, 5, 1])
        (2, 4)
    """
    if rows < 1 or ub_size < 1:
        raise ValueError(f"`balanced`: rows and ub_size must be at least 1. Got {rows} and {ub_size}.")
    pieces = -(-rows // ub_size)
    if amounts is not None:
        return _by_amounts(amounts, pieces, ub_size)
    smaller_rows, larger_pieces = divmod(rows, pieces)
    return (smaller_rows + 1,) * larger_pieces + (smaller_rows,) * (pieces - larger_pieces)


def _by_amounts(amounts: Sequence[int], pieces: int, ub_size: int) -> tuple[int, ...]:
    """Each piece in turn ends where it comes nearest to its share of what is left."""
    rows, held = len(amounts), list(accumulate(amounts, initial=0))
    sizes, start = [], 0
    for left in range(pieces, 0, -1):
        goal = held[start] + (held[-1] - held[start]) / left
        least, most = max(start + 1, rows - (left - 1) * ub_size), min(start + ub_size, rows)
        stop = min(range(least, most + 1), key=lambda end: abs(held[end] - goal))
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)
