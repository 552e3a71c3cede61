"""How the pieces of one call get their size: as the caller says, or as memory allows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from anybatch.fit.guard import is_out_of_memory


class Fitting(ABC):
    """The size of the pieces of one call."""

    @abstractmethod
    def most_rows(self) -> int:
        """The largest number of rows of a piece.

        Raises:
            DoesNotFitError: Not even the smallest piece fits.
        """

    @abstractmethod
    def after(self, error: BaseException, sizes: Sequence[int]) -> int | None:
        """The largest number of rows to try after pieces of some sizes ended with an error.

        Returns:
            The rows; None where the error is not to be answered by smaller pieces.

        Raises:
            DoesNotFitError: Memory ran out, and pieces can't be smaller.
        """

    @contextmanager
    def watched(self, sizes: Sequence[int]) -> Iterator[None]:
        """A context for one attempt, which learns from it where it goes through."""
        yield


@final
class Fixed(Fitting):
    """The caller's size, which is never exceeded and never changed."""

    def __init__(self, function: str, ub_size: int, shares: int) -> None:
        self._function = function
        self._ub_size = ub_size
        self._shares = shares

    def most_rows(self) -> int:
        return self._ub_size * self._shares

    def after(self, error: BaseException, sizes: Sequence[int]) -> int | None:
        if is_out_of_memory(error):
            error.add_note(self._advice(sizes))
        return None

    def _advice(self, sizes: Sequence[int]) -> str:
        rows = min(sizes[0], self._ub_size)
        unit = ("1 row" if rows == 1 else f"{rows} rows") + (" per device" if self._shares > 1 else "")
        smaller = f"a smaller `ub_size`, {max(rows // 2, 1)} say" if rows > 1 else "a smaller model or input"
        return (
            f"`apply`: out of memory in {self._function} with micro-batches of {unit}. Gradients, buffers "
            f'and random state are as they were before the call. Try {smaller}, or `ub_size="auto"`.'
        )
