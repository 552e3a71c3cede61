"""What can't be cut is refused at once, by name, with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from anybatch.batch import lay_out
from anybatch.errors import BatchError

from .kinds import Sample

ROWS = 10


def _assert_refused(arguments: dict[str, Any], *words: str, **options: Any) -> None:
    with pytest.raises(BatchError) as caught:
        lay_out(arguments, **options)
    for word in words:
        assert word in str(caught.value)


def test_disagreement_lists_every_entry_and_its_rows() -> None:
    """Entries with different numbers of rows are all named with theirs, nested ones by path."""
    batch = {"label": np.zeros(8), "deep": Sample(torch.ones(ROWS))}
    _assert_refused(
        {"x": torch.ones(ROWS), "batch": batch},
        "x: 10 rows",
        "batch.label: 8 rows",
        "batch.deep.first: 10 rows",
        "batch_dim={'batch.label': None}",
    )


def test_disagreement_with_one_row_is_none() -> None:
    """A single row goes with any number, and is not blamed where others disagree."""
    _assert_refused(
        {"one": torch.ones(1), "x": torch.ones(ROWS), "y": torch.ones(8)},
        "one: 1 row (passes whole)",
        "batch_dim={'y': None}",
    )


def test_long_disagreement_is_cut_short() -> None:
    """An error about a thousand entries stays readable."""
    with pytest.raises(BatchError) as caught:
        lay_out({"batch": {f"x{i}": torch.ones(i + 2) for i in range(1000)}})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": torch.ones(0, 3)},
        {"x": torch.ones(0, 3), "y": np.ones(0)},
        {"x": torch.ones(0, 3), "names": []},
        {"names": []},
        {"x": torch.ones(0, 3), "temperature": 1.0},
    ],
)
def test_zero_rows_are_refused(arguments: dict[str, Any]) -> None:
    """An empty mini-batch is an error, not an empty piece."""
    _assert_refused(arguments, "at least one row")


def test_zero_rows_beside_some_is_a_disagreement() -> None:
    """An empty tensor does not pass whole."""
    _assert_refused({"x": torch.ones(0), "y": torch.ones(ROWS)}, "x: 0 rows", "y: 10 rows")


@pytest.mark.parametrize(
    "arguments", [{}, {"x": 1.0}, {"x": "text", "y": None}, {"x": torch.tensor(1.0)}, {"x": {}}]
)
def test_nothing_with_rows_is_refused(arguments: dict[str, Any]) -> None:
    """A mini-batch needs an entry with rows."""
    _assert_refused(arguments, "must have rows")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "set"),
        (torch.nn.Linear(1, 1), "Linear"),
        (range(ROWS), "range"),
        (object(), "object"),
        (lambda: None, "function"),
    ],
)
def test_unknown_kind_that_is_named_is_refused(value: Any, words: str) -> None:
    """An object that can't be opened is no batch argument; the error names it and both ways out."""
    _assert_refused(
        {"x": torch.ones(ROWS), "odd": value},
        "odd",
        words,
        "anybatch.batch.register",
        "batch_dim={'odd': None}",
    )


@pytest.mark.parametrize("nested", [False, True])
def test_iterator_is_refused_at_any_depth(nested: bool) -> None:
    """What can be read only once can't be given to several pieces."""
    rows = (i for i in range(ROWS))
    arguments = (
        {"batch": {"x": torch.ones(ROWS), "rows": rows}} if nested else {"x": torch.ones(ROWS), "rows": rows}
    )
    _assert_refused(arguments, "rows is an iterator (generator)", "Give a list")


def test_unknown_kind_as_long_as_the_batch_is_refused_at_any_depth() -> None:
    """An object with one element per row would lose its rows if it passed whole."""
    batch = {"x": torch.ones(ROWS), "odd": range(ROWS)}
    _assert_refused({"batch": batch}, "batch.odd", "10", "range", "batch_dim={'batch.odd': None}")
    assert lay_out({"batch": batch}, batch_dim={"batch.odd": None}).cut(0, 2)["batch"]["odd"] is batch["odd"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "way_out"),
    [
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr tensor", "x.to_sparse_coo()"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "nested strided",
            "torch.jagged",
        ),
    ],
    ids=["csr", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_tensor_without_rows_is_refused(
    make: Callable[[], torch.Tensor], kind: str, way_out: str, nested: bool
) -> None:
    """Tensors that can't be cut are refused by name, with what can, unless they are declared shared."""
    tensor = make()
    arguments: dict[str, Any] = {"batch": {"odd": tensor}} if nested else {"odd": tensor}
    path = "batch.odd" if nested else "odd"
    _assert_refused({"x": torch.ones(3), **arguments}, path, kind, way_out)
    layout = lay_out({"x": torch.ones(3), **arguments}, batch_dim={path: None})
    piece = layout.cut(0, 2)
    assert (piece["batch"]["odd"] if nested else piece["odd"]) is tensor


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", [DataLoader, lambda data: data], ids=["DataLoader", "Dataset"])
def test_loader_is_refused_at_any_depth(make: Callable[[Any], Any], nested: bool) -> None:
    """What gives mini-batches is none."""
    loader = make(TensorDataset(torch.ones(ROWS)))
    arguments = {"x": torch.ones(ROWS), "loader": loader}
    words = ("loader is no mini-batch", type(loader).__name__, "Loop over it")
    _assert_refused({"batch": arguments} if nested else arguments, *words)


@pytest.mark.parametrize("dim", [1, -2, 5])
def test_dim_out_of_range_is_refused(dim: int) -> None:
    """A tensor or array without the batch dim is named with its shape."""
    for flat in (torch.ones(ROWS), np.ones(ROWS)):
        _assert_refused(
            {"x": torch.ones(ROWS, ROWS, *[1] * 4), "flat": flat},
            f"flat has no dim {dim}",
            "(10,)",
            batch_dim=dim,
        )


def test_zero_dim_tensor_has_no_dim_to_miss() -> None:
    """A 0-dim tensor passes whole at any batch dim."""
    assert lay_out({"x": torch.ones(2, ROWS), "t": torch.tensor(1.0)}, batch_dim=1).rows == ROWS


@pytest.mark.parametrize(
    "bad", [True, 1.0, "0", None, [0], {"x": True}, {"x": 0.0}, {"x": "rows"}, {"x": [0]}]
)
def test_batch_dim_of_another_kind_is_refused(bad: Any) -> None:
    """A dim is an int, and no bool."""
    _assert_refused({"x": torch.ones(ROWS)}, "`batch_dim`", repr(bad), batch_dim=bad)


@pytest.mark.parametrize("path", ["z", "batch.z", "batch.x.0", "batch.pair.7", "x", 3])
def test_unknown_path_is_refused_with_the_known_ones(path: Any) -> None:
    """A misspelt path never goes unnoticed."""
    batch = {"x": torch.ones(ROWS), "pair": [torch.ones(ROWS), "text"]}
    _assert_refused({"batch": batch}, repr(path), "batch, batch.x, batch.pair", batch_dim={path: 0})


@pytest.mark.parametrize("value", [torch.ones(ROWS), {"a": torch.ones(ROWS)}, "text", Sample(1)])
def test_list_declared_where_there_is_none_is_refused(value: Any) -> None:
    """Only a list or tuple can have one element per row."""
    _assert_refused({"x": torch.ones(ROWS), "y": value}, "y is declared 'list'", batch_dim={"y": "list"})


def test_declaring_inside_a_list_of_rows_is_refused() -> None:
    """The elements of a list of rows are no entries."""
    arguments = {"y": [torch.ones(2)] * ROWS}
    _assert_refused(arguments, "Declare nothing inside", batch_dim={"y": "list", "y.0": 0})


def test_declared_list_of_another_length_is_a_disagreement() -> None:
    """A declared list of rows does not pass whole, even with a single element."""
    _assert_refused({"x": torch.ones(ROWS), "y": ["a"]}, "y: 1 row", "x: 10 rows", batch_dim={"y": "list"})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_all_problems_come_at_once() -> None:
    """One error names every argument that is wrong."""
    _assert_refused(
        {"x": torch.ones(ROWS), "y": torch.ones(8), "odd": {1}, "sparse": torch.eye(ROWS).to_sparse_csr()},
        "x: 10 rows, y: 8 rows",
        "odd is of a kind",
        "sparse can't be cut",
    )


def test_error_says_call_rule_fact_and_way_out() -> None:
    """The message of a disagreement reads as one sentence each."""
    expected = (
        "`apply`: all entries must have the same number of rows. Got x: 10 rows, y: 8 rows. "
        "Declare an entry that all rows share: `batch_dim={'y': None}`."
    )
    with pytest.raises(BatchError, match=re.escape(expected)):
        lay_out({"x": torch.ones(ROWS), "y": torch.ones(8)})
