"""Tests of `anybatch.batch.extent`."""

import torch

from anybatch.batch import extent, lay_out


def test_extent_is_the_shape_of_a_row() -> None:
    """Dims other than that of the rows count, whatever the number of rows."""
    small = lay_out({"x": torch.zeros(4, 3, 5), "label": torch.zeros(4)})
    large = lay_out({"x": torch.zeros(9, 3, 5), "label": torch.zeros(9)})
    assert extent(small) == extent(large) == (3, 5)


def test_extent_of_time_major_rows() -> None:
    """The dim of the rows is left out wherever it is."""
    layout = lay_out({"x": torch.zeros(7, 4, 2)}, {"x": 1})
    assert extent(layout) == (7, 2)


def test_extent_of_lists_grows_with_what_they_hold() -> None:
    """A list with one element per row counts by what its rows hold on average, in steps."""

    def of(length: int) -> tuple[int, ...]:
        return extent(lay_out({"boxes": [torch.zeros(length, 4)] * 3}, {"boxes": "list"}))

    assert of(10) == of(10)
    assert len(of(10)) == len(of(20)) == 1
    assert of(10) < of(20)


def test_extent_of_nested_and_shared_entries() -> None:
    """Entries of containers come in order, and what passes whole counts too."""
    layout = lay_out({"b": {"x": torch.zeros(4, 3), "table": torch.zeros(7, 2)}}, {"b.table": None})
    assert extent(layout)[0] == 3
    assert len(extent(layout)) == 2
    assert 14 <= extent(layout)[1] <= 16
