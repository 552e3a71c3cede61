"""How many rows an entry can have, and the numbers on which several entries agree."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Possible:
    """The numbers of rows that an entry, or several together, can stand for.

    Attributes:
        rows: The numbers that it would have by itself.
        fits_any: Whether it also goes with any other number, because it can pass whole.
        is_one_row: Whether it holds a tensor of one row, so that a mini-batch of one row is the likeliest
            reading.
    """

    rows: frozenset[int] = frozenset()
    fits_any: bool = False
    is_one_row: bool = False

    @property
    def is_impossible(self) -> bool:
        return not (self.rows or self.fits_any)

    @property
    def candidates(self) -> tuple[int, ...]:
        """The numbers of rows in order; one alone where a tensor of one row speaks for it."""
        return (1,) if self.is_one_row and 1 in self.rows else tuple(sorted(self.rows))

    def allows(self, rows: int) -> bool:
        """Whether the entry can be part of a mini-batch of this many rows."""
        return self.fits_any or rows in self.rows

    def __and__(self, other: "Possible") -> "Possible":
        agreed = {rows for rows in self.rows | other.rows if self.allows(rows) and other.allows(rows)}
        return Possible(
            frozenset(agreed), self.fits_any and other.fits_any, self.is_one_row or other.is_one_row
        )


ANY = Possible(fits_any=True)
IMPOSSIBLE = Possible()


def exactly(rows: int) -> Possible:
    """An entry that has `rows` rows and no other reading."""
    return Possible(frozenset({rows}))


def or_any(rows: int) -> Possible:
    """An entry that has `rows` rows by itself, and passes whole where the mini-batch has another number."""
    return Possible(frozenset({rows}), fits_any=True)


def together(parts: Iterable[Possible]) -> Possible:
    """What several entries can stand for together; stops at the first that can't go with those before it."""
    agreed = ANY
    for part in parts:
        agreed &= part
        if agreed.is_impossible:
            break
    return agreed
