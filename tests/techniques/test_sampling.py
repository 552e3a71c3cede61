"""Parts of a dataset: how many rows, which, in what shares."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.techniques.training import assert_equal, two_steps
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from anybatch.errors import TechniqueError
from anybatch.techniques import Sampling
from anybatch.techniques.drawing import exact_shares


class Photos(Dataset[tuple[int, str]]):
    """Rows that are loaded one by one, and labels that are held beside them."""

    def __init__(self, labels: list[str]) -> None:
        self.targets = labels
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[int, str]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        self.loaded.append(row)
        return row, self.targets[row]


def rows_of(subset: Any) -> list[int]:
    return list(subset.indices)


@given(st.integers(1, 300), st.data())
def test_no_row_is_drawn_twice(length: int, data: st.DataObject) -> None:
    """The rows that are drawn are as many as asked for, in range, and all different."""
    rows = data.draw(st.integers(1, length))
    drawn = rows_of(Sampling(rows=rows, seed=data.draw(st.integers(0, 9))).sample(range(length)))
    assert len(drawn) == len(set(drawn)) == rows
    assert set(drawn) <= set(range(length))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_every_class_has_its_exact_share(counts: list[int], data: st.DataObject) -> None:
    """Of each class as many are drawn as its share says, rounded down or up, and together as asked."""
    labels = [f"class {at}" for at, count in enumerate(counts) for _ in range(count)]
    rows = data.draw(st.integers(1, len(labels)))
    sample = Sampling(rows=rows, stratify="targets", seed=3).sample(Photos(labels))
    drawn = rows_of(sample)
    assert len(set(drawn)) == len(drawn) == rows
    found = Counter(labels[row] for row in drawn)
    for at, count in enumerate(counts):
        share = Fraction(count * rows, len(labels))
        assert int(share) <= found[f"class {at}"] <= -int(-share // 1)


def test_the_largest_remainders_are_rounded_up() -> None:
    """10 of 6, 7 and 7 rows are 3.0, 3.5 and 3.5: one of the two halves gets the row that is left."""
    shares = {tuple(exact_shares([6, 7, 7], 10, np.random.default_rng(seed))) for seed in range(20)}
    assert shares == {(3, 4, 3), (3, 3, 4)}


def test_the_same_seed_draws_the_same_rows() -> None:
    """A seed stands for one part; another one draws another."""
    labels = Photos(["a"] * 30 + ["b"] * 30)
    for stratify in (None, "targets"):
        parts = [rows_of(Sampling(0.3, stratify=stratify, seed=seed).sample(labels)) for seed in (1, 1, 2)]
        assert parts[0] == parts[1] != parts[2]


def test_rows_are_shuffled() -> None:
    """Rows come in random order, and classes are mixed; the whole is a permutation."""
    labels = ["a"] * 200 + ["b"] * 200
    for stratify in (None, "targets"):
        drawn = rows_of(Sampling(1.0, stratify=stratify).sample(Photos(labels)))
        assert sorted(drawn) == list(range(400))
        # 200 expected in each half of the order; 100 +- 5 standard deviations of 5.
        assert 75 <= sum(row < 200 for row in drawn[:200]) <= 125


def test_every_row_has_the_same_chance() -> None:
    """Over many seeds each of 10 rows is drawn 3 times in 10."""
    counts = Counter(
        row for seed in range(2000) for row in rows_of(Sampling(rows=3, seed=seed).sample(range(10)))
    )
    assert all(abs(counts[row] - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5 for row in range(10))


@pytest.mark.parametrize(
    ("fraction", "length", "rows"), [(0.1, 30, 3), (0.29, 100, 29), (0.5, 5, 3), (1, 7, 7)]
)
def test_a_fraction_is_taken_as_it_is_written(fraction: float, length: int, rows: int) -> None:
    """A tenth of 30 is 3; halves are rounded up."""
    assert len(Sampling(fraction).sample(range(length))) == rows


def test_train_and_test_are_cut_in_proportion() -> None:
    """`rows` count for the first; the second keeps its size relative to it, and at least one row."""
    parts = Sampling(rows=20).sample_in_proportion(range(100), range(50), range(1))
    assert [len(each) for each in parts] == [20, 10, 1]


def test_a_part_of_more_rows_than_float32_can_count() -> None:
    """Of 2**24 + 9 rows and more, rows above 2**24 are drawn as well, and all of them can be."""
    length = 2**24 + 9
    drawn = np.asarray(Sampling(rows=length).sample(range(length)).indices)  # type: ignore[attr-defined]
    assert len(drawn) == length
    assert np.bincount(drawn, minlength=length).max() == 1


def test_a_few_of_very_many_rows_take_memory_for_the_few() -> None:
    """A thousand rows of 2**40 are drawn within a megabyte."""
    tracemalloc.start()
    drawn = rows_of(Sampling(rows=1000).sample(range(2**40)))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(drawn)) == 1000
    assert max(drawn) > 2**24
    assert peak_bytes < 1 << 20


def test_labels_are_found_where_they_are() -> None:
    """An attribute, a tensor, a column, a row's entry, through subsets and joined datasets: the same part."""
    labels = [at % 3 for at in range(30)]
    photos = Photos([str(label) for label in labels])
    expected = rows_of(Sampling(rows=9, stratify="targets").sample(photos))
    assert photos.loaded == []
    tensors = TensorDataset(torch.arange(30), torch.tensor(labels))
    dicts = [{"x": at, "label": label} for at, label in enumerate(labels)]
    halves = ConcatDataset([Subset(photos, range(12)), Subset(photos, range(12, 30))])
    for dataset, where in ((photos, 1), (tensors, 1), (dicts, "label"), (halves, "targets"), (halves, 1)):
        assert rows_of(Sampling(rows=9, stratify=where).sample(dataset)) == expected  # type: ignore[arg-type]
    assert Counter(labels[row] for row in expected) == {0: 3, 1: 3, 2: 3}


def test_a_subset_has_the_labels_of_its_own_rows() -> None:
    """Of 5 rows of each class 2 of each are drawn, whatever classes the whole dataset begins with."""
    subset = Subset(Photos(["a"] * 10 + ["b"] * 10), range(5, 15))
    for seed in range(8):
        drawn = rows_of(Sampling(rows=4, stratify="targets", seed=seed).sample(subset))
        assert sorted(row < 5 for row in drawn) == [False, False, True, True]


def test_only_rows_of_a_subset_are_loaded_for_their_labels() -> None:
    """Labels of a subset are read from its rows, not from all of what it is a part of."""
    photos = Photos(["a", "b"] * 10)
    Sampling(rows=2, stratify=1).sample(Subset(photos, [4, 7, 9]))
    assert photos.loaded == [4, 7, 9]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("none", "has none, and neither has its row 0"),
        (5, "has none, and neither has its row 0"),
        ("x", r"float32 of shape \(4, 2\)"),
        ("ragged", "made of objects"),
        ("__len__", "made of objects"),
    ],
)
def test_labels_that_are_none_are_refused(where: str | int, reason: str) -> None:
    """What is no label for each row is said."""

    class Odd(Photos):
        x = torch.zeros(4, 2)
        ragged = ((1,), (1, 2), (3,), (4,))

    with pytest.raises(TechniqueError, match=reason):
        Sampling(rows=2, stratify=where).sample(Odd(["a"] * 4))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Stream(), "no length or gives no row by number"),
        (iter([1]), "no length or gives no row by number"),
        ([], "of 0 rows"),
        ([1, 2], "rows=3 and a dataset of 2 rows"),
    ],
)
def test_what_can_not_be_drawn_from_is_refused(dataset: Any, reason: str) -> None:
    """Streams, empty datasets and those with fewer rows are said."""
    with pytest.raises(TechniqueError, match=reason):
        Sampling(rows=3).sample(dataset)


def test_drawing_leaves_random_state_alone() -> None:
    """Neither torch's nor numpy's random state moves (Rule 7)."""
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]
    Sampling(0.5, stratify=1).sample(TensorDataset(torch.arange(4), torch.tensor([0, 1, 0, 1])))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.random.get_state()[1].tobytes() == before[1]  # type: ignore[index,union-attr]


@pytest.mark.parametrize("ub_size", [None, 1, 3, 4])
def test_training_on_a_part_is_training_on_those_rows(ub_size: int | None) -> None:
    """A loader over the part gives its rows in its order; steps are those on these rows, in pieces too."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    part = Sampling(rows=7, seed=5).sample(TensorDataset(x, y))
    rows = rows_of(part)
    (batch,) = DataLoader(part, batch_size=7)  # type: ignore[arg-type,var-annotated]
    assert torch.equal(batch[0], x[rows])
    models = [nn.Linear(4, 1).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, ours = (
        two_steps(model, a, b, ub_size=size)
        for model, a, b, size in ((models[0], x[rows], y[rows], None), (models[1], *batch, ub_size))
    )
    for expected, got in zip(plain, ours, strict=True):
        if ub_size is None:
            assert_equal(expected, got)
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
