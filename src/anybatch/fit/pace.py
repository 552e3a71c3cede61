"""The fastest size of pieces: one after another is halved as long as that pays."""

from dataclasses import dataclass, field
from typing import final

__all__ = ["Pace"]

_DIVISORS = (1, 2, 4, 8)
# The first call of a size prepares kernels, so it says nothing; of the others the fastest was the least
# disturbed.
_WARM_UP = 1
_TIMED = 2
_LEAST_GAIN_RATIO = 1.02


@final
@dataclass(eq=False)
class Pace:
    """Rows per second of the sizes that were tried, each as a divisor of the largest size that fits.

    Attributes:
        rates_rows_per_s: What each divisor reached, call by call.
    """

    rates_rows_per_s: dict[int, list[float]] = field(default_factory=dict)

    def divisor(self, most_rows: int, least_rows: int) -> int:
        """The divisor to use next: one that is being tried, else the fastest.

        Args:
            most_rows: The largest size that fits.
            least_rows: The smallest size that may be used.
        """
        best = 1
        for divisor in _DIVISORS:
            if divisor > 1 and most_rows // divisor < max(2, least_rows):
                break
            if not self._is_tried(divisor):
                return divisor
            if divisor > 1 and self.best(divisor) < _LEAST_GAIN_RATIO * self.best(best):
                break
            best = divisor
        return best

    def is_settled(self, most_rows: int, least_rows: int) -> bool:
        """Is there nothing left to try?"""
        return self._is_tried(self.divisor(most_rows, least_rows))

    def see(self, divisor: int, rows: int, duration_s: float) -> None:
        """Takes note of a call with pieces of one size."""
        if duration_s > 0 and not self._is_tried(divisor):
            self.rates_rows_per_s.setdefault(divisor, []).append(rows / duration_s)

    def best(self, divisor: int) -> float:
        """The most rows per second that a divisor reached; 0 where it was not timed."""
        return max(self.rates_rows_per_s.get(divisor, ())[_WARM_UP:], default=0.0)

    def _is_tried(self, divisor: int) -> bool:
        return len(self.rates_rows_per_s.get(divisor, ())) >= _WARM_UP + _TIMED
