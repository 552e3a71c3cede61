"""Whatever the nesting and the cut, every row comes once, in order, with all that belongs to it (Rule 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.batch import balanced, feed, join, lay_out

from .kinds import LISTS, MAPPINGS, RECORDS

SHARED = [0.5, 7, None, "text", True]

Blueprint = Callable[[int], Any]


def _row_tensor(shape: tuple[int, ...]) -> Blueprint:
    return lambda rows: torch.arange(rows).view(-1, *(1 for _ in shape)).expand(rows, *shape).clone()


def _row_array(shape: tuple[int, ...]) -> Blueprint:
    return lambda rows: _row_tensor(shape)(rows).numpy()


def _row_list(make_row: Callable[[int], Any], kind: Callable[[list[Any]], Any]) -> Blueprint:
    return lambda rows: kind([make_row(i) for i in range(rows)])


SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
ROWS_OF_LISTS = st.sampled_from(
    [
        lambda i: f"s{i}",
        lambda i: i,
        lambda i: {"boxes": torch.full((i % 3, 4), i), "id": f"s{i}"},
        lambda i: [i] * (i % 4),
        lambda i: torch.full((i % 3, 2), i),
    ]
)
ENTRIES = (
    SHAPES.map(_row_tensor)
    | SHAPES.map(_row_array)
    | st.builds(_row_list, ROWS_OF_LISTS, st.sampled_from(list(LISTS.values())))
    | st.sampled_from(SHARED).map(lambda value: lambda rows: value)
    | st.just(lambda rows: torch.tensor(3.0))
    | st.just(lambda rows: torch.ones(1, 2))
)


def _nest(inner: st.SearchStrategy[Blueprint]) -> st.SearchStrategy[Blueprint]:
    def mapping(make: Callable[[dict[str, Any]], Any], parts: dict[str, Blueprint]) -> Blueprint:
        return lambda rows: make({key: part(rows) for key, part in parts.items()})

    def record(make: Callable[..., Any], first: Blueprint, second: Blueprint) -> Blueprint:
        return lambda rows: make(first(rows), second=second(rows))

    keys = st.sampled_from(["a", "b", "c"])
    return st.builds(
        mapping, st.sampled_from(list(MAPPINGS.values())), st.dictionaries(keys, inner, max_size=3)
    ) | st.builds(record, st.sampled_from(list(RECORDS.values())), inner, inner)


BATCHES = st.recursive(ENTRIES, _nest, max_leaves=8)


def _children(value: Any) -> list[Any]:
    if hasattr(value, "items"):
        return [child for _, child in value.items()]
    if hasattr(value, "first"):
        return [value.first, value.second]
    return []


def _assert_same(piece: Any, whole: Any, start: int, rows: int, total: int) -> None:
    """Compare a piece with the whole by hand: types, and rows where there are rows."""
    assert type(piece) is type(whole)
    if isinstance(whole, torch.Tensor | np.ndarray):
        has_rows = whole.ndim > 0 and whole.shape[0] == total
        expected = whole[start : start + rows] if has_rows else whole
        assert piece.shape == expected.shape
        assert (piece == expected).all()
    elif isinstance(whole, list | tuple) and not hasattr(whole, "first"):
        assert [str(element) for element in piece] == [str(e) for e in whole[start : start + rows]]
    elif _children(whole):
        assert len(_children(piece)) == len(_children(whole))
        for part, entry in zip(_children(piece), _children(whole), strict=True):
            _assert_same(part, entry, start, rows, total)
    else:
        assert piece == whole


@given(batch=BATCHES, total=st.integers(5, 17), ub_size=st.integers(1, 20))
def test_every_row_comes_once_in_order_with_its_own(batch: Blueprint, total: int, ub_size: int) -> None:
    """Each piece holds the rows that it says, in every entry, in containers of the given types."""
    whole = {"x": torch.arange(total), "batch": batch(total)}
    layout = lay_out(whole)
    assert layout.rows == total
    start = 0
    for piece in feed(layout, balanced(total, ub_size), None):
        assert piece.start == start
        _assert_same(piece.arguments, whole, start, piece.rows, total)
        start += piece.rows
    assert start == total


@given(batch=BATCHES, total=st.integers(5, 17), data=st.data())
def test_any_range_can_be_cut(batch: Blueprint, total: int, data: st.DataObject) -> None:
    """A cut of any range of rows holds that range."""
    whole = {"x": torch.arange(total), "batch": batch(total)}
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    _assert_same(lay_out(whole).cut(start, stop), whole, start, stop - start, total)


@given(batch=BATCHES, rows=st.tuples(st.integers(5, 12), st.integers(5, 12)))
def test_structure_is_that_of_the_pattern(batch: Blueprint, rows: tuple[int, int]) -> None:
    """Two batches made from one blueprint have the same structure, whatever their rows."""
    one, other = (lay_out({"x": torch.arange(n), "batch": batch(n)}).structure for n in rows)
    assert one == other
    assert hash(one) == hash(other)


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    make=st.sampled_from(list(MAPPINGS.values())),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_joining_what_was_cut_gives_the_whole(
    shapes: list[tuple[int, ...]], make: Callable[[dict[str, Any]], Any], sizes: list[int]
) -> None:
    """Outputs that are the pieces themselves are joined to the mini-batch."""
    total = sum(sizes)
    whole = {f"x{i}": _row_tensor(shape)(total) for i, shape in enumerate(shapes)}
    pieces = [piece.arguments["batch"] for piece in feed(lay_out({"batch": make(whole)}), sizes, None)]
    joined = join(pieces, sizes, None)
    assert type(joined) is type(make({}))
    assert all(torch.equal(joined[key], value) for key, value in whole.items())
