"""Rows to try a loss on, and where they are halved."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_FEW_ROWS = 4
_WIDE_ROWS = 8
_MOST_CUTS = 8


@dataclass(frozen=True)
class Cut:
    """Rows `start` to `stop`, halved at `middle`.

    Attributes:
        total: The rows of the mini-batch.
        is_wide: Are these more rows than a piece has? Their large results are not kept.
    """

    start: int
    middle: int
    stop: int
    total: int
    is_wide: bool = False

    @property
    def beside(self) -> tuple[int, int]:
        """Rows whose graph shows, beside that of the piece, where rows are.

        Not a single one if that can be helped: some operators take another form for it.
        """
        if self.middle - self.start > 1 or self.total <= self.stop - self.start:
            return self.start, self.middle
        return (self.start, self.stop + 1) if self.stop < self.total else (self.start - 1, self.stop)

    @property
    def rows(self) -> tuple[int, int]:
        return self.middle - self.start, self.stop - self.middle


def halve(start: int, rows: int, total: int) -> Cut:
    """The piece that starts at `start`, cut in two, unevenly where both parts keep two rows.

    A piece of one row takes the next (or the previous) row along: it has no halves.
    """
    if rows == 1:
        start, rows = min(start, total - 2), 2
    first = rows // 2 + 1 if rows >= 6 else (rows + 1) // 2
    return Cut(start, start + first, start + rows, total)


def wide(rows: int, total: int) -> Cut | None:
    """More rows than a piece of few has: those hide by chance that they depend on each other.

    Only the values of the losses are compared on them, for which nothing of the forward run needs to be kept.
    """
    width = min(total, _WIDE_ROWS)
    return replace(halve(0, width, total), is_wide=True) if rows <= _FEW_ROWS and width > rows else None


def straddle(sizes: Sequence[int], index: int) -> Cut:
    """As many rows as a piece has, from the last of the piece before the given one on into it."""
    border, rows = sum(sizes[:index]), max(min(sizes[index], sum(sizes)), 2)
    start = max(border - rows // 2, 0)
    stop = min(start + rows, sum(sizes))
    return Cut(start, border, stop, sum(sizes))


def spread(sizes: Sequence[int], index: int) -> list[Cut]:
    """The piece of the given index, then as many rows from elsewhere, spread over the mini-batch."""
    rows, total = sizes[index], sum(sizes)
    start, last = sum(sizes[:index]), total - rows
    steps = range(1, _MOST_CUTS + 1)
    starts = [start, *((start + step * max(last, 1) // _MOST_CUTS) % (last + 1) for step in steps)]
    cuts = [halve(one, rows, total) for one in dict.fromkeys(starts)]
    # Of another size, for constants that only look like ones at one size.
    return [cuts[0], halve(start, rows // 2, total), *cuts[1:]] if rows >= 4 else cuts
