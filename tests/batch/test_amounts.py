"""Pieces can be balanced by what their rows hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from anybatch.batch import balanced, lay_out
from anybatch.errors import BatchError

from .exactness import assert_exact, pieces_of


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 12))
def test_pieces_by_amounts_keep_the_limits(amounts: list[int], ub_size: int) -> None:
    """Every row is in one piece, none has too many, and there are no more pieces than needed."""
    sizes = balanced(len(amounts), ub_size, amounts)
    assert sum(sizes) == len(amounts)
    assert 1 <= min(sizes) <= max(sizes) <= ub_size
    assert len(sizes) == -(-len(amounts) // ub_size)


@pytest.mark.parametrize("amount", [0, 1, 7])
@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (29, 8), (7, 7), (5, 1)])
def test_equal_amounts_are_cut_evenly(rows: int, ub_size: int, amount: int) -> None:
    """Rows that hold the same are cut into sizes that differ by at most one row, unless they hold nothing."""
    sizes = balanced(rows, ub_size, [amount] * rows)
    assert max(sizes) - min(sizes) <= 1 or amount == 0


def test_known_cuts() -> None:
    """A heavy row leaves the light ones to other pieces."""
    assert balanced(6, 5, [100, 1, 1, 1, 1, 1]) == (1, 5)
    assert balanced(6, 5, [1, 1, 1, 1, 1, 100]) == (5, 1)
    assert balanced(6, 3, [5, 5, 1, 1, 1, 1]) == (3, 3)


KINDS = {
    "texts": (["a" * count for count in (9, 1, 1, 1, 1, 1)], [9, 1, 1, 1, 1, 1]),
    "tensors": ([torch.ones(count, 2) for count in (3, 1)], [6, 2]),
    "arrays": ([np.ones(count) for count in (3, 1)], [3, 1]),
    "dicts": ([{"boxes": torch.ones(count, 4), "id": "x"} for count in (3, 1)], [13, 5]),
    "numbers": ([5, 6], [1, 1]),
    "jagged": (torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=torch.jagged), [3, 1]),
    "packed": (pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False), [1, 3]),
}


@pytest.mark.parametrize(("value", "expected"), KINDS.values(), ids=list(KINDS))
def test_rows_of_every_kind_are_weighed(value: Any, expected: list[int]) -> None:
    """Elements of tensors, characters of texts and lengths of sequences count."""
    assert lay_out({"x": value}, batch_dim={"x": "balanced"}).amounts == expected
    assert lay_out({"x": value}, batch_dim={"x": "list" if isinstance(value, list) else 0}).amounts is None


def test_several_balanced_entries_count_together() -> None:
    """Amounts of several entries are added."""
    batch = {"x": ["aa", "b"], "y": ["c", "ddd"]}
    assert lay_out(batch, batch_dim={"x": "balanced", "y": "balanced"}).amounts == [3, 4]


@pytest.mark.parametrize("value", [torch.ones(4, 2), np.ones(4), torch.eye(4).to_sparse(), 5, "text", None])
def test_rows_of_one_size_are_refused(value: Any) -> None:
    """Balancing where all rows hold the same is a mistake."""
    with pytest.raises(BatchError, match="x is declared 'balanced', but its rows all hold the same"):
        lay_out({"x": value, "y": torch.ones(4)}, batch_dim={"x": "balanced"})


@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 2), (12, 5)])
def test_balanced_texts_equal_the_whole(rows: int, ub_size: int) -> None:
    """Pieces of uneven rows give the gradient of the whole."""
    network = nn.Embedding(4, 3).double()
    texts = [[(row + place) % 4 for place in range(1 + 5 * row % 7)] for row in range(rows)]

    def step(texts: list[list[int]]) -> torch.Tensor:
        tokens = torch.tensor([token for text in texts for token in text])
        return network(tokens).pow(2).mean()

    assert_exact(step, {"texts": texts}, network, ub_size, batch_dim={"texts": "balanced"})
    held = [sum(map(len, piece)) for piece in pieces_of(texts, ub_size, batch_dim={"batch": "balanced"})]
    plain = [sum(map(len, piece)) for piece in pieces_of(texts, ub_size)]
    assert max(held) <= max(plain)
