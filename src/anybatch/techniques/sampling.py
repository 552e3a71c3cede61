"""A part of the training set, drawn at random, with every class in the share that it had."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, final

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset

from anybatch.errors import TechniqueError
from anybatch.techniques.drawing import draw, draw_stratified
from anybatch.techniques.row_labels import row_labels
from anybatch.techniques.technique import Technique


@final
@dataclass(frozen=True)
class Sampling(Technique):
    """Trains on a part of the rows, drawn without repetition and in random order.

    The same seed draws the same rows of the same dataset. Memory grows with the rows that are drawn, not with
    those of the dataset, unless they are stratified; there is no largest number of either.

    Error: exact for the rows that are drawn; of the others the model learns nothing.

    Source: sampling without replacement; shares by the largest remainder (Hare and Niemeyer).

    Attributes:
        fraction: How much of a dataset is drawn, above 0 and at most 1; rounded to whole rows.
        rows: How many rows are drawn, at least 1. One of the two is given.
        stratify: Where labels are found, whose classes keep their shares: the name of an attribute of the
            dataset or of an entry of each row, or the place of the label in each row. None draws from all
            rows alike.
        seed: What the rows are drawn by, at least 0.

    Raises:
        TechniqueError: An option is none of these.

    >>> sample = Sampling(rows=3, seed=1).sample(range(10))
    >>> len(sample), len({sample[0], sample[1], sample[2]})
    (3, 3)
    """

    recommendation: ClassVar[int | None] = 10
    source: ClassVar[str] = "Sampling without replacement; shares by the largest remainder"
    exactness: ClassVar[str] = "Exact for the rows that are drawn; nothing is learnt of the others."

    fraction: float | None = None
    rows: int | None = None
    stratify: str | int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = list(self._wrong())
        if wrong:
            raise TechniqueError(
                f"`Sampling`: a part is a fraction above 0 and at most 1, or at least 1 row; `stratify` a "
                f"name or a place from 0 on; `seed` at least 0. Got {' and '.join(wrong)}. Write "
                f"Sampling(fraction=0.2), for example."
            )

    def _wrong(self) -> Iterator[str]:
        if (self.fraction is None) == (self.rows is None):
            yield f"fraction={self.fraction!r} with rows={self.rows!r}"
        is_number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if self.fraction is not None and not (is_number and 0 < self.fraction <= 1):
            yield f"fraction={self.fraction!r}"
        if self.rows is not None and not _is_whole(self.rows, 1):
            yield f"rows={self.rows!r}"
        is_name = isinstance(self.stratify, str) and self.stratify != ""
        if self.stratify is not None and not (is_name or _is_whole(self.stratify, 0)):
            yield f"stratify={self.stratify!r}"
        if not _is_whole(self.seed, 0):
            yield f"seed={self.seed!r}"

    def sample(self, dataset: Sized) -> Sized:
        """The rows of one dataset that are trained on.

        Raises:
            TechniqueError: It has no numbered rows, or less than are to be drawn; or its labels are not
                found.
        """
        return self.sample_in_proportion(dataset)[0]

    def sample_in_proportion(self, *datasets: Sized) -> tuple[Subset[Any], ...]:
        """The same part of each dataset, of one to train on and one to test on, for example.

        `rows` are those drawn from the first; the others are cut in the same proportion, each to at least
        one row.

        Raises:
            TechniqueError: As `sample` does.
        """
        lengths = [_length(each) for each in datasets]
        part = self._part(lengths[0]) if lengths else Fraction(1)
        return tuple(
            self._subset(each, max(1, _rounded(part * length)))
            for each, length in zip(datasets, lengths, strict=True)
        )

    def _part(self, length: int) -> Fraction:
        if self.rows is None:
            assert self.fraction is not None
            # As it is written: 0.1 is a tenth, not the binary number next to it.
            return Fraction(repr(float(self.fraction)))
        if self.rows > length:
            raise TechniqueError(
                f"`Sampling`: no row is drawn twice. Got rows={self.rows} and a dataset of {length} rows. "
                f"Ask for fewer."
            )
        return Fraction(self.rows, length)

    def _subset(self, dataset: Sized, rows: int) -> Subset[Any]:
        generator = np.random.default_rng(self.seed)
        length = len(dataset)
        if self.stratify is None:
            indices = draw(length, rows, generator)
        else:
            indices = draw_stratified(row_labels(dataset, self.stratify), rows, generator)
        return Subset(_as_dataset(dataset), indices)


def _length(dataset: Sized) -> int:
    """How many rows there are; at least one."""
    is_numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_numbered or isinstance(dataset, IterableDataset):
        raise TechniqueError(
            f"`Sampling`: rows are drawn by their numbers. Got a {type(dataset).__name__}, which has no "
            f"length or gives no row by number. Take the part where its rows are made."
        )
    if len(dataset) == 0:
        raise TechniqueError(
            f"`Sampling`: a part is drawn from at least 1 row. Got a {type(dataset).__name__} of 0 rows. "
            f"Check where it is read."
        )
    return len(dataset)


def _rounded(rows: Fraction) -> int:
    """To whole rows, a half upwards."""
    return int(rows + Fraction(1, 2))


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _as_dataset(dataset: Any) -> Dataset[Any]:
    """What has rows by number is a dataset for a loader, of whatever class."""
    found: Dataset[Any] = dataset
    return found
