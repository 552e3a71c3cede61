"""A figure about memory that says where it comes from, and how bytes are written for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

__all__ = ["Quantity", "Reading", "in_words"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Quantity(Enum):
    """What a figure about memory measures: figures that must never be taken for each other."""

    LIVE = "in use now"
    PEAK = "most in use so far"
    RESERVED = "held, with caches"
    LIMIT = "limit"
    BUDGET = "to be had"


@final
@dataclass(frozen=True)
class Reading:
    """One figure about memory.

    Attributes:
        quantity: What it measures.
        amount_bytes: The figure; None where this machine sets no such limit or can't tell.
        source: Who says so: a file, a call or a library.
    """

    quantity: Quantity
    amount_bytes: int | None
    source: str

    def __str__(self) -> str:
        figure = "none" if self.amount_bytes is None else in_words(self.amount_bytes)
        return f"{self.quantity.value}: {figure} ({self.source})"


def in_words(amount_bytes: int) -> str:
    """Bytes in the largest binary unit of which there is at least one.

    Example:
        >>> in_words(3 * 1024**2 + 200_000)
        '3.2 MiB'
        >>> in_words(512)
        '512 B'
    """
    unit = min(max(abs(amount_bytes), 1).bit_length() - 1, 49) // 10
    digits = 0 if unit == 0 else 1
    return f"{amount_bytes / 1024**unit:.{digits}f} {_UNITS[unit]}"
