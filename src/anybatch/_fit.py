"""How the pieces of one call get their size: as the caller says, or as memory allows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from anybatch._settings import Settings
from anybatch.errors import DoesNotFitError
from anybatch.fit.auto import Auto
from anybatch.fit.guard import MemoryVerdict, is_out_of_memory, memory_verdict


class Fitting(ABC):
    """The size of the pieces of one call."""

    @abstractmethod
    def most_rows(self, rows: int) -> int:
        """The largest number of rows of a piece, for a mini-batch of so many rows."""

    @abstractmethod
    def after(self, error: BaseException, function: str, sizes: Sequence[int]) -> int | None:
        """The largest number of rows to try after an attempt with pieces of some sizes failed.

        Returns:
            The rows; None where the error is not to be answered by smaller pieces.

        Raises:
            DoesNotFitError: Memory ran out, and pieces can't be smaller.
        """


@final
class Fixed(Fitting):
    """The caller's size, which is never exceeded and never changed."""

    def __init__(self, ub_size: int, shares: int) -> None:
        self._ub_size = ub_size
        self._shares = shares

    def most_rows(self, rows: int) -> int:
        return self._ub_size * self._shares

    def after(self, error: BaseException, function: str, sizes: Sequence[int]) -> int | None:
        if is_out_of_memory(error):
            error.add_note(self._advice(function, sizes))
        return None

    def _advice(self, function: str, sizes: Sequence[int]) -> str:
        rows = min(sizes[0], self._ub_size)
        unit = ("1 row" if rows == 1 else f"{rows} rows") + (" per device" if self._shares > 1 else "")
        smaller = f"a smaller `ub_size`, {max(rows // 2, 1)} say" if rows > 1 else "a smaller model or input"
        return (
            f"`apply`: out of memory in {function} with micro-batches of {unit}. Gradients, buffers "
            f"and random state are as they were before the call. Try {smaller}."
        )


@final
class Automatic(Fitting):
    """As memory allows."""

    def most_rows(self, rows: int) -> int:
        return rows

    def after(self, error: BaseException, function: str, sizes: Sequence[int]) -> int | None:
        verdict = memory_verdict(error)
        if verdict is MemoryVerdict.NO:
            return None
        if max(sizes) > 1:
            return max(sizes) // 2
        if verdict is MemoryVerdict.MAYBE:
            return None
        raise DoesNotFitError(
            f"`{function}`: no micro-batch fits. One row needs more memory than there is."
        ) from error


def fitting_of(settings: Settings) -> Fitting:
    """How the options say that pieces get their size."""
    if isinstance(settings.ub_size, Auto):
        return Automatic()
    return Fixed(settings.ub_size, settings.shares)
