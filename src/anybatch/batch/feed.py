"""Hand out the micro-batches one after another, on the device where they are computed.

A piece is built when it is asked for and forgotten when it is handed out: nothing here keeps one alive (rule
4). A consumer that asks for the next piece while it holds the current one has two on the device, never more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.batch.containers import map_tensors
from anybatch.batch.inputs import InputLeaf
from anybatch.batch.layout import Layout
from anybatch.batch.parts import Taker
from anybatch.memory.device import copies_asynchronously


@dataclass(frozen=True, eq=False)
class Piece:
    """One micro-batch.

    Attributes:
        index: Its place among the pieces, from 0.
        start: Its first row in the mini-batch.
        rows: Its rows.
        arguments: The named arguments, cut and on the device.
        inputs: The leaves that stand for entries that require grad.
    """

    index: int
    start: int
    rows: int
    arguments: dict[str, Any]
    inputs: tuple[InputLeaf, ...]


def feed(
    layout: Layout, sizes: Sequence[int], device: torch.device | None, *, copies: bool = False
) -> Iterator[Piece]:
    """Hand out the pieces of a mini-batch in row order.

    Args:
        layout: The mini-batch.
        sizes: Rows of each piece; they add up to the rows of the mini-batch.
        device: Where the tensors are moved, at any depth; None leaves each where it is.
        copies: Are the pieces to be copies also where they need not move? torch.compile wants that (it
            specialises on where in a storage a view begins), and a run that is to leave no trace.

    Raises:
        ValueError: The sizes don't add up to the rows of the mini-batch, or one is less than 1.
    """
    if sum(sizes) != layout.rows or min(sizes) < 1:
        raise ValueError(
            f"`feed`: sizes must be at least 1 and add up to {layout.rows} rows. Got {tuple(sizes)}."
        )
    return _pieces(layout, sizes, device, copies)


def piece_of(layout: Layout, start: int, rows: int, device: torch.device | None) -> Piece:
    """A copy of the piece of `rows` rows from `start`, for a look at it outside the order of `feed`."""
    return _piece(layout, 0, start, rows, _Mover(device, start, {}, copies=True))


def outside_inference(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their inference tensors copied: autograd can't save these."""
    return {name: map_tensors(value, _without_inference) for name, value in arguments.items()}


def _without_inference(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _pieces(
    layout: Layout, sizes: Sequence[int], device: torch.device | None, copies: bool
) -> Iterator[Piece]:
    shared: dict[int, Tensor] = {}
    start = 0
    for index, rows in enumerate(sizes):
        # No local name may hold the piece: it would live on while the consumer waits for the next one.
        yield _piece(layout, index, start, rows, _Mover(device, start, shared, copies))
        start += rows


def _piece(layout: Layout, index: int, start: int, rows: int, mover: "_Mover") -> Piece:
    arguments = layout.take(start, rows, mover)
    return Piece(index, start, rows, arguments, tuple(mover.inputs))


class _Mover(Taker):
    """Takes tensors to the device and stands a leaf in for each one that requires grad."""

    def __init__(
        self, device: torch.device | None, start: int, shared: dict[int, Tensor], copies: bool = False
    ) -> None:
        self._device = device
        self._copies = copies
        self._start = start
        self._shared = shared
        self.inputs: list[InputLeaf] = []

    def rows_of(self, source: Tensor, dim: int, start: int, rows: int) -> Tensor:
        taken = self._moved(source.detach().narrow(dim, start, rows))
        return self._stand_in(source, self._copied(taken, source), dim)

    def element(self, source: Tensor) -> Tensor:
        return self._stand_in(source, self._copied(self._moved(source), source), None)

    def shared(self, source: Tensor) -> Tensor:
        # Moved once for all pieces: it is no piece's own, so keeping it does not grow with the mini-batch.
        if id(source) not in self._shared:
            self._shared[id(source)] = self._copied(self._moved(source), source)
        return self._stand_in(source, self._shared[id(source)], None)

    def _stand_in(self, source: Tensor, taken: Tensor, dim: int | None) -> Tensor:
        if not source.requires_grad:
            return taken
        leaf = taken.detach().requires_grad_()
        self.inputs.append(InputLeaf(source, leaf, dim, 0 if dim is None else self._start))
        return leaf

    def _copied(self, taken: Tensor, source: Tensor) -> Tensor:
        is_view = self._copies and taken.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        return taken.detach().clone() if is_view else taken

    def _moved(self, source: Tensor) -> Tensor:
        if self._device is None or source.device == self._device:
            return source
        with torch.no_grad():
            is_safe = copies_asynchronously(self._device) and source.is_pinned()
            return source.to(self._device, non_blocking=is_safe)
