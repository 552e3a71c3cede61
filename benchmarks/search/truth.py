"""The true largest size: a fresh process for each size, bisected."""

from collections.abc import Callable

from children import ChildDied, limited
from nets import Problem

from anybatch.fit.guard import MemoryVerdict, memory_verdict

STEPS = 2
PIECES = 2
TOLERANCE_RATIO = 0.002


def true_largest(family: str, budget_bytes: int) -> int:
    """The most rows of a piece with which a plain loop of two pieces takes two steps of AdamW.

    Error: bisected to 0.2 %, at least 1 row.
    """
    low, high = 0, 2
    while _fits(family, budget_bytes, high):
        low, high = high, 2 * high
    while high - low > max(1, TOLERANCE_RATIO * low):
        middle = (low + high) // 2
        if _fits(family, budget_bytes, middle):
            low = middle
        else:
            high = middle
    return low


def _fits(family: str, budget_bytes: int, size: int) -> bool:
    try:
        return bool(limited(_trial, budget_bytes, family, size))
    except ChildDied:  # what is not written to be told that there is no memory aborts
        return False


def _trial(family: str, size: int) -> Callable[[], bool]:
    problem = Problem(family, PIECES * size)

    def run() -> bool:
        try:
            for _ in range(STEPS):
                problem.step(size)
        except Exception as error:
            if memory_verdict(error) is MemoryVerdict.NO:
                raise
            return False
        return True

    return run
