"""Numbers of rows drawn at random, none twice; and how many of each class make an exact share."""

from array import array

import numpy as np
from numpy.typing import NDArray


def draw(length: int, rows: int, generator: np.random.Generator) -> "array[int]":
    """`rows` of the numbers below `length`, in random order. Takes memory for `rows`, where these are few."""
    return _as_numbers(generator.choice(length, rows, replace=False))


def draw_stratified(labels: NDArray[np.int64], rows: int, generator: np.random.Generator) -> "array[int]":
    """The same, with each label in its share.

    Args:
        labels: The class of each row, as a number from 0 on.
        rows: How many are drawn.
        generator: What they are drawn by.
    """
    counts = np.bincount(labels)
    by_label = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    drawn = [
        generator.choice(of_label, taken, replace=False)
        for of_label, taken in zip(by_label, exact_shares(counts.tolist(), rows, generator), strict=True)
    ]
    return _as_numbers(generator.permutation(np.concatenate(drawn)))


def exact_shares(counts: list[int], rows: int, generator: np.random.Generator) -> list[int]:
    """How many of each class are drawn: its exact share, rounded down or up, and `rows` together.

    Those with the largest remainders are rounded up; equal ones are told apart by chance.
    """
    total = sum(counts)
    shares = [count * rows // total for count in counts]
    remainders = [count * rows % total for count in counts]
    chance = generator.permutation(len(counts)).tolist()
    largest = sorted(range(len(counts)), key=lambda label: (-remainders[label], chance[label]))
    for label in largest[: rows - sum(shares)]:
        shares[label] += 1
    return shares


def _as_numbers(values: NDArray[np.int64]) -> "array[int]":
    """A sequence of Python's own ints, at 8 bytes each, which workers share without copying."""
    return array("q", values.astype(np.int64, copy=False).tobytes())
