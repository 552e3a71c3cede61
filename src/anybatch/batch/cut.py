"""Cut a number of rows into micro-batches of nearly equal size."""


def balanced(rows: int, ub_size: int) -> tuple[int, ...]:
    """Cut `rows` into as few pieces as `ub_size` allows, all of nearly the same size.

    The sizes differ by at most one row, so at most two sizes occur (a compiled function makes at most two
    graphs) and there is no short last piece: a piece of one row occurs only where `rows` or `ub_size` is 1,
    or `ub_size` is 2 and the number of rows odd.

    Args:
        rows: Rows of the mini-batch, at least 1.
        ub_size: The largest number of rows in one piece, at least 1.

    Returns:
        The rows of each piece, largest first; they add up to `rows`.

    Raises:
        ValueError: `rows` or `ub_size` is less than 1.

    Example:
        >>> balanced(10, 4)
        (4, 3, 3)
        >>> balanced(29, 8)
        (8, 7, 7, 7)
    """
    if rows < 1 or ub_size < 1:
        raise ValueError(f"`balanced`: rows and ub_size must be at least 1. Got {rows} and {ub_size}.")
    pieces = -(-rows // ub_size)
    smaller_rows, larger_pieces = divmod(rows, pieces)
    return (smaller_rows + 1,) * larger_pieces + (smaller_rows,) * (pieces - larger_pieces)
