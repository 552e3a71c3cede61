"""Rows to try a loss on, and where they are halved."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_FEW_ROWS = 4
_WIDE_ROWS = 8
_ENOUGH_ROWS = 16
_STEPS = (4, 6, 2, 7, 1, 5, 3, 8)


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
    def halves(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first row of each half, and the row after its last."""
        return (self.start, self.middle), (self.middle, self.stop)

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


def straddle(sizes: Sequence[int], index: int) -> list[Cut]:
    """The given piece and the one before it, together; then as many rows as a piece has, on both sides."""
    border, total = sum(sizes[:index]), sum(sizes)
    rows = max(min(sizes[index], total), 2)
    start = max(border - rows // 2, 0)
    both = Cut(border - sizes[index - 1], border, border + sizes[index], total, is_wide=True)
    return [both, Cut(start, border, min(start + rows, total), total)]


def spread(sizes: Sequence[int], index: int) -> list[Cut]:
    """Rows of the piece of the given index, then others, spread over the mini-batch.

    The first cut is the one that costs: of a large piece it takes a part. The next two are small and from
    elsewhere, for what adds up on some rows by chance: of three rows, two or one, no batch has a half.
    """
    rows, total = sizes[index], sum(sizes)
    start, last = sum(sizes[:index]), total - rows
    few = max(min(rows, _ENOUGH_ROWS), rows // 8)
    starts = [start, *((start + step * max(last, 1) // len(_STEPS)) % (last + 1) for step in _STEPS)]
    pieces = [halve(one, rows, total) for one in dict.fromkeys(starts)]
    first = halve(start, few, total)
    small = [_small(place, size, rows, total) for place, size in zip(starts[1:3], (3, 2), strict=True)]
    return list(dict.fromkeys([first, *(cut for cut in small if cut and cut.rows != first.rows), *pieces]))


def _small(start: int, size: int, rows: int, total: int) -> Cut | None:
    """A cut of few rows, if there are as many; wide if a piece has fewer."""
    if total < size:
        return None
    return replace(halve(min(start, total - size), size, total), is_wide=size > max(rows, 2))
