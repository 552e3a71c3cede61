"""Which entries have rows, how many, and what passes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.batch import lay_out
from anybatch.errors import BatchError

from .kinds import LISTS, MAPPINGS, RECORDS, Sample

ROWS = 10


def _numbers(rows: int = ROWS, *shape: int) -> torch.Tensor:
    """A tensor whose row i holds i."""
    return torch.arange(rows).view(rows, *(1 for _ in shape)).expand(rows, *shape)


def _names(rows: int = ROWS) -> list[str]:
    return [f"s{i}" for i in range(rows)]


def test_tensors_and_arrays_are_cut_along_their_first_dim() -> None:
    """Row i of a tensor stays with row i of an array."""
    layout = lay_out({"x": _numbers(ROWS, 3), "y": np.arange(ROWS)})
    piece = layout.cut(3, 6)
    assert layout.rows == ROWS
    assert piece["x"].tolist() == [[3] * 3, [4] * 3, [5] * 3]
    assert isinstance(piece["y"], np.ndarray)
    assert piece["y"].tolist() == [3, 4, 5]


def test_cut_gives_views() -> None:
    """Rows are not copied on the host."""
    x, y = torch.zeros(ROWS, 2), np.zeros(ROWS)
    piece = lay_out({"x": x, "y": y}).cut(4, 6)
    piece["x"] += 1
    piece["y"] += 1
    assert x.sum() == 4
    assert y.sum() == 2


@pytest.mark.parametrize(
    "shared",
    [
        torch.tensor(2.0),
        torch.ones(1, 3),
        np.float64(2.0),
        np.array(2.0),
        np.ones((1, 3)),
        0.5,
        3,
        True,
        None,
        "0123456789",
        b"0123456789",
        torch.float32,
        torch.Size([ROWS] * ROWS),
        [],
        (),
        ["one"],
        [7],
        [torch.tensor(1.0), torch.ones(1, 2)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_belongs_to_no_row_passes_whole(shared: Any) -> None:
    """0-dim and one-row tensors, scalars, strings as long as the batch and short lists come as they are."""
    piece = lay_out({"x": _numbers(), "batch": {"shared": shared, "y": _numbers()}}).cut(2, 5)
    assert piece["batch"]["shared"] is shared
    assert piece["batch"]["y"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("shared", [0.5, "text", None, torch.tensor(1.0), torch.ones(1, 3)])
def test_named_argument_without_rows_passes_whole(shared: Any) -> None:
    """A scalar may be named among the batch arguments."""
    assert lay_out({"x": _numbers(), "shared": shared}).cut(0, 4)["shared"] is shared


def test_container_without_rows_is_the_same_object_in_every_piece() -> None:
    """A configuration inside a batch is not rebuilt."""
    config = Sample(0.1, {"name": "adam"})
    assert lay_out({"batch": {"x": _numbers(), "config": config}}).cut(0, 4)["batch"]["config"] is config


def test_unknown_object_inside_a_batch_passes_whole() -> None:
    """What is neither known nor of the batch's length is handed on."""
    model = torch.nn.Linear(2, 2)
    assert lay_out({"batch": {"x": _numbers(), "model": model}}).cut(0, 4)["batch"]["model"] is model


def test_one_row_everywhere_is_one_row() -> None:
    """Where every tensor has one row, the mini-batch has one."""
    layout = lay_out({"x": torch.ones(1, 3), "pair": [torch.ones(1, 5), torch.ones(1, 5)], "names": ["a"]})
    assert layout.rows == 1
    assert layout.cut(0, 1)["names"] == ["a"]


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=list(MAPPINGS))
def test_mappings_are_cut_inside_and_keep_their_type(make: Callable[[dict[str, Any]], Any]) -> None:
    """Every kind of mapping is cut at the same rows and comes back as itself."""
    value = make({"x": _numbers(), "ids": _names(), "temperature": 0.5})
    piece = lay_out({"batch": value}).cut(3, 5)["batch"]
    assert type(piece) is type(value)
    assert list(piece) == ["x", "ids", "temperature"]
    assert (piece["x"].tolist(), piece["ids"], piece["temperature"]) == ([3, 4], ["s3", "s4"], 0.5)


@pytest.mark.parametrize("make", RECORDS.values(), ids=list(RECORDS))
def test_records_are_cut_inside_and_keep_their_type(make: Callable[..., Any]) -> None:
    """Every kind of named tuple and dataclass is cut at the same rows and comes back as itself."""
    value = make(_numbers(), second=_names())
    piece = lay_out({"batch": value}).cut(3, 5)["batch"]
    assert type(piece) is type(value)
    assert (piece.first.tolist(), piece.second) == ([3, 4], ["s3", "s4"])


@pytest.mark.parametrize("make", LISTS.values(), ids=list(LISTS))
def test_lists_of_rows_keep_their_type(make: Callable[[list[Any]], Any]) -> None:
    """A list with one element per row is sliced and comes back as itself."""
    value = make(_names())
    piece = lay_out({"x": _numbers(), "ids": value}).cut(3, 5)["ids"]
    assert type(piece) is type(value)
    assert list(piece) == ["s3", "s4"]


@pytest.mark.parametrize("make", LISTS.values(), ids=list(LISTS))
def test_lists_of_entries_keep_their_type(make: Callable[[list[Any]], Any]) -> None:
    """A list whose tensors have the rows is cut inside and comes back as itself."""
    value = make([_numbers(ROWS, 2), _numbers(ROWS, 2)])
    piece = lay_out({"x": _numbers(), "pair": value}).cut(3, 5)["pair"]
    assert type(piece) is type(value)
    assert [entry.tolist() for entry in piece] == [[[3, 3], [4, 4]]] * 2


@pytest.mark.parametrize(
    ("dim", "shape", "expected"),
    [(1, (3, ROWS), 1), (-1, (3, ROWS), 1), (-2, (ROWS, 3), 0), (2, (1, 2, ROWS), 2)],
)
@pytest.mark.parametrize("as_array", [False, True])
def test_batch_dim_says_where_the_rows_are(
    dim: int, shape: tuple[int, ...], expected: int, as_array: bool
) -> None:
    """An int, negative ones included, holds for all arguments."""
    x: Any = torch.arange(torch.Size(shape).numel()).view(shape)
    piece = lay_out({"x": x.numpy() if as_array else x}, batch_dim=dim).cut(4, 7)["x"]
    assert piece.tolist() == x.narrow(expected, 4, 3).tolist()


def test_batch_dim_by_path_leaves_the_others_alone() -> None:
    """A declared path has its own dim, the rest has dim 0."""
    batch = {
        "hidden": torch.arange(2 * ROWS).view(2, ROWS),
        "x": _numbers(),
        "deep": [_numbers(ROWS, 2), "text"],
    }
    piece = lay_out({"batch": batch}, batch_dim={"batch.hidden": 1}).cut(3, 5)["batch"]
    assert piece["hidden"].tolist() == [[3, 4], [13, 14]]
    assert piece["x"].tolist() == [3, 4]
    assert piece["deep"][0].tolist() == [[3, 3], [4, 4]]


def test_longest_declared_path_wins() -> None:
    """What is declared for an entry beats what is declared for the container around it."""
    batch = {"table": _numbers(), "inner": {"x": _numbers(), "table": _numbers()}}
    piece = lay_out({"batch": batch}, batch_dim={"batch": None, "batch.inner.x": 0}).cut(3, 5)["batch"]
    assert piece["inner"]["x"].tolist() == [3, 4]
    assert piece["table"] is batch["table"]
    assert piece["inner"]["table"] is batch["inner"]["table"]


def test_prefix_is_a_whole_name() -> None:
    """Declaring `x` says nothing about `x2`."""
    piece = lay_out({"x": _numbers(), "x2": _numbers(), "y": _numbers()}, batch_dim={"x": None}).cut(0, 2)
    assert len(piece["x"]) == ROWS
    assert len(piece["x2"]) == 2


@pytest.mark.parametrize("value", [torch.ones(ROWS, 3), torch.ones(7, 3), _names(), {1, 2}, [1, "two"]])
def test_declared_shared_passes_whole(value: Any) -> None:
    """An entry that all rows share is not cut, whatever its size and kind."""
    assert (
        lay_out({"x": _numbers(), "shared": value}, batch_dim={"shared": None}).cut(0, 4)["shared"] is value
    )


def test_keys_that_are_no_strings_have_paths_too() -> None:
    """A path spells a key as it prints, dots included."""
    batch = {0: _numbers(), "layer.weight": _numbers(7)}
    piece = lay_out({"batch": batch}, batch_dim={"batch.layer.weight": None, "batch.0": 0}).cut(0, 4)["batch"]
    assert len(piece[0]) == 4
    assert piece["layer.weight"] is batch["layer.weight"]


def test_tensor_under_two_names_is_cut_under_both() -> None:
    """An aliased argument gives the same rows twice."""
    x = _numbers()
    piece = lay_out({"x": x, "target": x}).cut(3, 5)
    assert piece["x"].tolist() == piece["target"].tolist() == [3, 4]
    assert piece["x"].data_ptr() == piece["target"].data_ptr()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.ones(4), "y": torch.ones(4)}, torch.device("cpu")),
        ({"x": [torch.ones(2, 3, device="meta")] * 4, "y": torch.ones(4)}, torch.device("meta")),
        ({"shared": torch.ones(1, device="meta"), "x": torch.ones(4)}, torch.device("cpu")),
        ({"x": np.ones(4)}, None),
    ],
)
def test_device_is_that_of_the_first_tensor_with_rows(batch: Any, expected: torch.device | None) -> None:
    """A batch lives where its first tensor with rows does."""
    assert lay_out(batch).device == expected


def test_structure_ignores_sizes_and_values() -> None:
    """Batches of one pattern have the same structure, hashable and equal."""

    def structure(rows: int, length: int) -> Any:
        batch = {"x": torch.randn(rows, length), "ids": _names(rows), "boxes": [{"b": torch.ones(2)}] * rows}
        return lay_out({"batch": batch, "y": np.zeros(rows), "scale": float(rows)}).structure

    assert structure(4, 3) == structure(9, 5)
    assert hash(structure(4, 3)) == hash(structure(9, 5))


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(4, 2), "y": [0.0] * 4, "extra": 1.0},
        {"x": torch.ones(4, 2), "y": (0.0,) * 4, "extra": None},
        {"x": torch.ones(4, 2).double(), "y": [0.0] * 4, "extra": None},
        {"x": torch.ones(4, 2, 2), "y": [0.0] * 4, "extra": None},
        {"x": torch.ones(4, 2, requires_grad=True), "y": [0.0] * 4, "extra": None},
        {"x": torch.ones(1, 2), "y": [0.0] * 4, "extra": None},
        {"x": torch.ones(4, 2), "y": ["a"] * 4, "extra": None},
        {"x": torch.ones(4, 2), "y": [0.0] * 4, "more": None},
        {"x": np.ones((4, 2)), "y": [0.0] * 4, "extra": None},
    ],
)
def test_structure_tells_patterns_apart(other: dict[str, Any]) -> None:
    """Another type, dtype, number of dims, key, or entry with rows is another structure."""
    one = {"x": torch.ones(4, 2), "y": [0.0] * 4, "extra": None}
    assert lay_out({"batch": one}).structure != lay_out({"batch": other}).structure


def test_many_rows_are_read_without_walking_them_for_each_piece() -> None:
    """Scalars in a long list of rows are never opened one by one."""
    opened: list[Any] = []

    class Name(str):
        def __iter__(self) -> Any:
            opened.append(self)
            return super().__iter__()

    layout = lay_out({"names": [Name(i) for i in range(1000)]})
    assert [layout.cut(i, i + 1)["names"] for i in range(3)] == [["0"], ["1"], ["2"]]
    assert opened == []


def test_zero_dim_rows_stay_with_their_element() -> None:
    """A list of 0-dim tensors is a list of rows."""
    labels = [torch.tensor(i) for i in range(ROWS)]
    assert lay_out({"x": _numbers(), "labels": labels}).cut(3, 5)["labels"] == labels[3:5]


def test_batch_error_is_a_value_error() -> None:
    """Code that knows nothing of the library can catch it."""
    with pytest.raises(ValueError, match="same number of rows") as caught:
        lay_out({"x": torch.ones(3), "y": torch.ones(4)})
    assert isinstance(caught.value, BatchError)
