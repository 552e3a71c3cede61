"""Pieces come in row order, on the device, and nothing keeps them alive (Rule 4)."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.batch import Piece, balanced, feed, lay_out

from .kinds import Sample

ROWS = 10
SIZES = balanced(ROWS, 4)
META = torch.device("meta")


def _batch() -> dict[str, Any]:
    return {
        "x": torch.arange(ROWS * 3.0).view(ROWS, 3),
        "batch": {
            "images": [torch.full((2, i + 1), float(i)) for i in range(ROWS)],
            "targets": [{"boxes": torch.ones(i, 4), "names": [f"n{i}"]} for i in range(ROWS)],
            "array": np.arange(ROWS),
            "names": [f"s{i}" for i in range(ROWS)],
            "shared": Sample(torch.ones(1, 3), "text"),
        },
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a piece of `_batch`, found without the code under test."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Sample):
        return _tensors(vars(value))
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for child in value for tensor in _tensors(child)] if isinstance(value, list) else []


def test_pieces_cover_every_row_in_order() -> None:
    """Each row is in one piece, beside its own entries, and the pieces say where they are (Rule 2)."""
    pieces = list(feed(lay_out(_batch()), SIZES, None))
    assert [(piece.index, piece.start, piece.rows) for piece in pieces] == [(0, 0, 4), (1, 4, 3), (2, 7, 3)]
    for piece in pieces:
        rows = list(range(piece.start, piece.start + piece.rows))
        batch = piece.arguments["batch"]
        assert (piece.arguments["x"][:, 0] / 3).tolist() == rows
        assert [int(image[0, 0]) for image in batch["images"]] == rows
        assert [len(target["boxes"]) for target in batch["targets"]] == rows
        assert batch["array"].tolist() == rows
        assert batch["names"] == [f"s{i}" for i in rows]
        assert [target["names"] for target in batch["targets"]] == [[f"n{i}"] for i in rows]
        assert batch["shared"].second == "text"


def test_tensors_are_moved_at_every_depth() -> None:
    """Tensors of rows, inside of rows, and shared ones arrive on the device; arrays and strings stay."""
    pieces = list(feed(lay_out(_batch()), SIZES, META))
    for piece in pieces:
        tensors = _tensors(piece.arguments)
        assert len(tensors) == 1 + 2 * piece.rows + 1
        assert {tensor.device for tensor in tensors} == {META}
        assert isinstance(piece.arguments["batch"]["array"], np.ndarray)


def test_without_device_tensors_stay_where_they_are() -> None:
    """With no device, rows are views of the caller's tensor and shared entries are the caller's own."""
    batch = _batch()
    piece = next(feed(lay_out(batch), SIZES, None))
    assert piece.arguments["x"].data_ptr() == batch["x"].data_ptr()
    assert piece.arguments["batch"]["shared"] is batch["batch"]["shared"]
    assert piece.arguments["batch"]["images"][1] is batch["batch"]["images"][1]


def test_caller_keeps_its_batch() -> None:
    """Feeding changes neither the caller's containers nor where its tensors are."""
    batch = _batch()
    list(feed(lay_out(batch), SIZES, META))
    assert {tensor.device.type for tensor in _tensors(batch)} == {"cpu"}
    assert batch["x"].shape == (ROWS, 3)


def test_shared_entry_is_moved_once() -> None:
    """A table that all rows share is the same device tensor in every piece, also under two names."""
    table = torch.ones(7, 3)
    layout = lay_out({"x": torch.ones(ROWS), "t": table, "u": [table]}, batch_dim={"t": None, "u": None})
    seen = {id(moved) for p in feed(layout, SIZES, META) for moved in (p.arguments["t"], p.arguments["u"][0])}
    assert len(seen) == 1


def _watched(piece: Piece) -> list[weakref.ref[Any]]:
    """Weak references to a piece and to everything in it that is its own."""
    own = [tensor for tensor in _tensors(piece.arguments) if tensor.shape != (1, 3)]
    return [weakref.ref(piece), *map(weakref.ref, own)]


def test_piece_dies_when_the_consumer_drops_it() -> None:
    """A paused feed holds no reference to the piece that it has handed out."""
    pieces = feed(lay_out(_batch()), SIZES, META)
    for _ in SIZES:
        piece = next(pieces)
        watched = _watched(piece)
        assert len(watched) == 2 + 2 * piece.rows
        del piece
        assert [ref() for ref in watched] == [None] * len(watched)


def test_at_most_two_pieces_live_in_a_loop() -> None:
    """A loop that holds the current piece while the next is built has two alive, never more."""
    watched: list[list[weakref.ref[Any]]] = []
    for piece in feed(lay_out(_batch()), balanced(ROWS, 1), META):
        watched.append(_watched(piece))
        assert [any(ref() is not None for ref in refs) for refs in watched] == [False] * piece.index + [True]
    del piece
    assert not any(ref() for refs in watched for ref in refs)


def test_leaf_dies_with_its_piece() -> None:
    """The leaf that stands for an input, and its gradient, go with the piece; only the small record stays."""
    x = torch.ones(ROWS, 3, requires_grad=True)
    collected = []
    for piece in feed(lay_out({"x": x}), SIZES, None):
        piece.arguments["x"].sum().backward()
        collected += [leaf.gradient() for leaf in piece.inputs]
        watched = weakref.ref(piece.inputs[0].leaf)
        del piece
        assert watched() is None
    assert [record.start for record in collected] == [0, 4, 7]


def test_next_piece_is_built_only_when_asked_for() -> None:
    """Nothing is moved ahead of its turn."""
    built: list[int] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.narrow:
                built.append(args[2])
            return super().__torch_function__(func, types, args, kwargs or {})

    pieces = feed(lay_out({"x": torch.ones(ROWS).as_subclass(Watched)}), SIZES, None)
    assert built == []
    next(pieces)
    assert built == [0]
    next(pieces)
    assert built == [0, 4]


@pytest.mark.parametrize("sizes", [(4, 3), (4, 3, 4), (10, 0), (11, -1)])
def test_sizes_that_do_not_add_up_are_refused(sizes: tuple[int, ...]) -> None:
    """A cut that would drop or repeat rows is refused before the first piece (Rule 2)."""
    with pytest.raises(ValueError, match="add up to 10 rows"):
        feed(lay_out({"x": torch.ones(ROWS)}), sizes, None)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_rows_arrive_on_a_cuda_device(pinned: bool) -> None:
    """Rows are the same on the device as on the host, from pinned memory too."""
    x = torch.arange(ROWS * 1000.0).view(ROWS, 1000)
    x = x.pin_memory() if pinned else x
    pieces = [piece.arguments["x"] for piece in feed(lay_out({"x": x}), SIZES, torch.device("cuda"))]
    assert {piece.device.type for piece in pieces} == {"cuda"}
    assert torch.equal(torch.cat(pieces).cpu(), x)
