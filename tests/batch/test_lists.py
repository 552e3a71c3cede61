"""Whether a list holds one element per row or entries with rows: the number of rows tells, or the caller."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.batch import lay_out
from anybatch.batch.lists import is_of_one_kind
from anybatch.errors import BatchError

ROWS = 6
BOXES = [5, 0, 1, 2, 0, 0]


def _images(rows: int = ROWS) -> list[torch.Tensor]:
    return [torch.full((3, 4 + i, 5), float(i)) for i in range(rows)]


def _targets(boxes: list[int]) -> list[dict[str, Any]]:
    return [{"boxes": torch.ones(n, 4) * i, "id": f"img{i}"} for i, n in enumerate(boxes)]


def _pair(rows: int) -> list[torch.Tensor]:
    return [torch.zeros(rows, 5), torch.ones(rows, 5)]


@pytest.mark.parametrize("boxes", [BOXES, [1] * ROWS, [0] * ROWS, [3] * (ROWS - 1) + [4]])
def test_detection_batch_is_cut_by_image(boxes: list[int]) -> None:
    """A list of images and a list of target dicts agree on the number of images, whatever the boxes."""
    layout = lay_out({"images": _images(), "targets": _targets(boxes)})
    piece = layout.cut(2, 5)
    assert layout.rows == ROWS
    assert [image[0, 0, 0].item() for image in piece["images"]] == [2, 3, 4]
    assert [target["id"] for target in piece["targets"]] == ["img2", "img3", "img4"]
    assert [len(target["boxes"]) for target in piece["targets"]] == boxes[2:5]


def test_as_many_boxes_in_every_image_as_images_is_ambiguous() -> None:
    """Six dicts of six boxes each may be six entries of six rows, until the list is declared."""
    batch = {"images": _images(), "targets": _targets([ROWS] * ROWS)}
    with pytest.raises(BatchError, match="targets is ambiguous"):
        lay_out(batch)
    assert [t["id"] for t in lay_out(batch, batch_dim={"targets": "list"}).cut(4, 6)["targets"]] == [
        "img4",
        "img5",
    ]


def test_detection_batch_in_one_tuple_is_a_container_once_declared() -> None:
    """A pair of lists of rows is a container of two entries; by itself it might be two rows."""
    batch = {"batch": (_images(), _targets(BOXES))}
    with pytest.raises(BatchError, match="ambiguous, 2 or 6"):
        lay_out(batch)
    images, targets = lay_out(batch, batch_dim={"batch": 0}).cut(2, 5)["batch"]
    assert [image[0, 0, 0].item() for image in images] == [2, 3, 4]
    assert [target["id"] for target in targets] == ["img2", "img3", "img4"]


@pytest.mark.parametrize("rows", [3, 10])
def test_pair_of_entries_beside_an_argument_with_rows(rows: int) -> None:
    """Two tensors with the batch's rows are a container; two rows they can't be."""
    layout = lay_out({"pair": _pair(rows), "y": torch.zeros(rows)})
    first, second = layout.cut(1, 3)["pair"]
    assert layout.rows == rows
    assert (first.shape, second.shape) == ((2, 5), (2, 5))
    assert (first.sum(), second.sum()) == (0, 10)


def test_images_and_labels_are_a_container_by_their_types() -> None:
    """What a loader gives for `(image, label)` needs no declaration: elements of two dtypes are no rows."""
    layout = lay_out({"batch": [torch.ones(ROWS, 3, 4), torch.arange(ROWS)]})
    images, labels = layout.cut(2, 4)["batch"]
    assert layout.rows == ROWS
    assert images.shape == (2, 3, 4)
    assert labels.tolist() == [2, 3]


def test_names_and_numbers_of_a_loader_are_a_container() -> None:
    """A tuple of strings beside a tensor of the same length is cut with it."""
    names, numbers = lay_out({"batch": [("a", "b", "c"), torch.arange(3)]}).cut(1, 3)["batch"]
    assert names == ("b", "c")
    assert numbers.tolist() == [1, 2]


@pytest.mark.parametrize(
    "rows",
    [
        ["a", "b", "c"],
        ["a", None, "c"],
        [1, 2.5, True],
        [np.float32(1), 2, 3.0],
        [{"n": 1}, {"n": 2}, {"n": 3}],
        [[1, 2], [3], []],
        [np.ones(2), np.ones(5), np.ones(0)],
        [torch.ones(2, 4), torch.ones(0, 4), torch.ones(1, 4)],
        [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
        [torch.ones(1), torch.ones(1), torch.ones(1)],
        [("a", 1), ("b", 2), ("c", 3)],
        [object(), object(), object()],
    ],
)
def test_rows_of_one_kind_are_rows(rows: list[Any]) -> None:
    """A list as long as the batch, of elements of one kind, is cut by element; no element is copied."""
    piece = lay_out({"x": torch.ones(3), "rows": rows}).cut(1, 3)["rows"]
    assert all(after is before for after, before in zip(piece, rows[1:], strict=True))


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([1, "a"], False),
        ([{"a": 1}, ["a"]], False),
        ([torch.ones(2), torch.ones(2).double()], False),
        ([torch.ones(2), torch.ones(2, 2)], False),
        ([torch.ones(2), np.ones(2)], False),
        ([torch.ones(2), None], False),
        ([None, None], False),
        ([{"a": 1}, None], False),
        ([np.array("a"), np.array("abc")], True),
        ([torch.nn.Parameter(torch.ones(2)), torch.ones(2)], True),
    ],
)
def test_kind_of_rows(elements: list[Any], expected: bool) -> None:
    """Rows have one type; tensors one dtype and number of dims; a missing row is one among scalars only."""
    assert is_of_one_kind(elements) is expected


def test_readings_agree_over_all_arguments() -> None:
    """Where no tensor tells, the one number that every list allows is taken."""
    layout = lay_out({"pair": _pair(ROWS), "names": ["a"] * ROWS, "images": _images()})
    assert layout.rows == ROWS
    assert [entry.shape for entry in layout.cut(0, 2)["pair"]] == [(2, 5), (2, 5)]


def test_list_of_one_entry_beside_an_argument_with_rows() -> None:
    """A list with a single tensor of all rows is a container."""
    (x,) = lay_out({"inputs": [torch.arange(ROWS)], "y": torch.ones(ROWS)}).cut(2, 4)["inputs"]
    assert x.tolist() == [2, 3]


def test_nested_lists_are_read_at_every_depth() -> None:
    """A list inside a list is read by the same rule."""
    batch = [torch.arange(ROWS), [["a"] * ROWS, [torch.arange(ROWS), "whole"]]]
    x, (names, (y, whole)) = lay_out({"batch": batch}).cut(2, 4)["batch"]
    assert (x.tolist(), names, y.tolist(), whole) == ([2, 3], ["a", "a"], [2, 3], "whole")


@pytest.mark.parametrize("beside", [{}, {"y": torch.zeros(2)}])
def test_ambiguous_list_is_refused(beside: dict[str, Any]) -> None:
    """Two entries of two rows may be two rows: the error gives both ways of declaring it."""
    with pytest.raises(BatchError, match="ambiguous") as caught:
        lay_out({"pair": _pair(2), **beside} if beside else {"pair": _pair(10)})
    assert "batch_dim={'pair': 'list'}" in str(caught.value)
    assert "batch_dim={'pair': 0}" in str(caught.value)


def test_every_ambiguous_list_is_named_at_once() -> None:
    """All ambiguous lists come in one error, by path."""
    with pytest.raises(BatchError) as caught:
        lay_out({"one": _pair(2), "batch": {"two": _pair(2)}, "y": torch.zeros(2)})
    assert "one is ambiguous" in str(caught.value)
    assert "batch.two is ambiguous" in str(caught.value)


@pytest.mark.parametrize("rows", [2, 10])
def test_list_declared_a_container(rows: int) -> None:
    """An int on the list's path says that its tensors have the rows, at that dim."""
    layout = lay_out({"pair": _pair(rows)}, batch_dim={"pair": 0})
    assert layout.rows == rows
    assert [entry.shape for entry in layout.cut(0, 1)["pair"]] == [(1, 5), (1, 5)]
    assert lay_out({"pair": _pair(rows)}, batch_dim={"pair": 1}).rows == 5


def test_list_declared_rows() -> None:
    """`"list"` says that the list has one element per row."""
    layout = lay_out({"pair": _pair(2), "y": torch.zeros(2)}, batch_dim={"pair": "list"})
    piece = layout.cut(1, 2)["pair"]
    assert len(piece) == 1
    assert piece[0].sum() == 10


def test_list_declared_rows_may_mix_kinds() -> None:
    """A declared list is cut by element, whatever its elements are."""
    rows = [torch.ones(2), "text", None]
    layout = lay_out({"rows": rows}, batch_dim={"rows": "list"})
    assert layout.rows == 3
    assert layout.cut(1, 3)["rows"] == ["text", None]


def test_declaring_an_element_makes_the_list_a_container() -> None:
    """A declared path inside a list says that the list holds entries."""
    pair = [torch.ones(ROWS, 2), torch.ones(2, ROWS)]
    first, second = lay_out({"pair": pair}, batch_dim={"pair.1": 1}).cut(0, 4)["pair"]
    assert (first.shape, second.shape) == ((4, 2), (2, 4))


def test_declaring_an_element_shared() -> None:
    """One entry of a list can be shared by all rows."""
    pair = [torch.ones(ROWS, 2), torch.ones(ROWS, 2)]
    first, second = lay_out({"pair": pair}, batch_dim={"pair.1": None}).cut(0, 4)["pair"]
    assert len(first) == 4
    assert second is pair[1]


def test_dim_of_an_argument_reaches_the_tensors_of_its_lists() -> None:
    """An int on a dict holds inside of its lists, which are read as before."""
    batch = {"states": [torch.ones(2, ROWS), torch.ones(3, ROWS)], "names": ["a"] * ROWS}
    piece = lay_out({"batch": batch}, batch_dim={"batch": 1}).cut(0, 4)["batch"]
    assert [state.shape for state in piece["states"]] == [(2, 4), (3, 4)]
    assert piece["names"] == ["a"] * 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0.5, 1.0], "2 rows"),
        ((224, 224, 3), "3 rows"),
        ([1, "two"], "no rows in either reading"),
        ([torch.ones(4, 2), torch.ones(5, 2)], "2 rows"),
        ([{"x": torch.ones(4)}], "1 or 4 rows"),
    ],
)
def test_list_that_fits_in_neither_reading_is_refused(value: Any, words: str) -> None:
    """A list that is neither rows nor entries of the batch's rows is named, with what it could be."""
    with pytest.raises(BatchError, match=re.escape(f"extra: {words}")) as caught:
        lay_out({"x": torch.ones(ROWS), "extra": value})
    assert "batch_dim={'extra': None}" in str(caught.value)


def test_long_list_beside_a_tensor_is_not_walked() -> None:
    """Where a tensor tells the number of rows, a list of lists is read by its first element."""
    opened: list[int] = []

    class Tokens(list[int]):
        def __iter__(self) -> Any:
            opened.append(self[0])
            return super().__iter__()

    rows = [Tokens([i, i]) for i in range(1000)]
    layout = lay_out({"x": torch.ones(1000), "tokens": rows})
    assert layout.rows == 1000
    assert set(opened) <= {0}


def test_single_entry_of_a_single_row_is_not_ambiguous() -> None:
    """Where there is one row, a list with one tensor of one row is cut the same in either reading."""
    layout = lay_out({"x": torch.ones(1, 3), "inputs": [torch.ones(1, 5)]})
    assert layout.rows == 1
    assert layout.cut(0, 1)["inputs"][0].shape == (1, 5)


def test_one_row_is_never_ambiguous() -> None:
    """Beside a tensor of one row, the last batch of a loader, two entries of one row are a container."""
    layout = lay_out({"x": torch.ones(1, 3), "pair": _pair(1)})
    assert layout.rows == 1
    assert [entry.shape for entry in layout.cut(0, 1)["pair"]] == [(1, 5), (1, 5)]
