"""Hand out the micro-batches one after another, on the device where they are computed.

A piece is forgotten when it is handed out: nothing here keeps one alive (Rule 4). It is built when it is
asked for; on an accelerator that copies while it computes, when the one before it is asked for::

    host      copy 0   copy 1   hand 0 out ..........   copy 2   hand 1 out ..........
    copies    [--0--]  [--1--]                          [--2--]
    computes                    [------- 0 -------]              [------- 1 -------]

So the device holds the current piece, the next one, and what it has not finished of the one before.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anybatch.batch.containers import map_tensors
from anybatch.batch.inputs import InputLeaf
from anybatch.batch.layout import Layout
from anybatch.batch.leaves import is_strided
from anybatch.batch.parts import Taker
from anybatch.memory.copies import CopyStream, copy_stream
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
    shared: dict[int, Tensor] = {}
    starts = list(accumulate(sizes, initial=0))
    stream = copy_stream(device) if len(sizes) > 1 else None

    def build(index: int) -> Piece:
        mover = _Mover(device, shared, copies, stream)
        return _piece(layout, index, starts[index], sizes[index], mover)

    return map(build, range(len(sizes))) if stream is None else _ahead(build, len(sizes), stream)


def piece_of(layout: Layout, start: int, rows: int, device: torch.device | None) -> Piece:
    """A copy of the piece of `rows` rows from `start`, for a look at it outside the order of `feed`."""
    return _piece(layout, 0, start, rows, _Mover(device, {}, copies=True))


def outside_inference(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their inference tensors copied: autograd can't save these."""
    return {name: map_tensors(value, _without_inference) for name, value in arguments.items()}


def _without_inference(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _ahead(build: Callable[[int], Piece], pieces: int, stream: CopyStream) -> Iterator[Piece]:
    """Builds each piece on the copy stream before the piece in front of it is handed out."""
    coming: deque[tuple[Piece, torch.Event]] = deque()
    for index in range(pieces + 1):
        if index < pieces:
            with stream.entered():
                coming.append((build(index), stream.mark()))
        if index:
            # No local name may hold the piece: it would live on while the consumer works with it.
            yield _handed_over(*coming.popleft(), stream)


def _handed_over(piece: Piece, mark: torch.Event, stream: CopyStream) -> Piece:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(piece.arguments, note)
    stream.hand_over(mark, tensors)
    return piece


def _piece(layout: Layout, index: int, start: int, rows: int, mover: "_Mover") -> Piece:
    arguments = layout.take(start, rows, mover)
    return Piece(index, start, rows, arguments, tuple(mover.inputs))


class _Mover(Taker):
    """Takes tensors to the device and stands a leaf in for each one that requires grad."""

    def __init__(
        self,
        device: torch.device | None,
        shared: dict[int, Tensor],
        copies: bool = False,
        stream: CopyStream | None = None,
    ) -> None:
        self._device = device
        self._copies = copies
        self._shared = shared
        self._stream = stream
        self.inputs: list[InputLeaf] = []

    def rows_of(self, source: Tensor, dim: int, start: int, rows: int) -> Tensor:
        return self._stand_in(
            source, self._moved(source.detach().narrow(dim, start, rows), source), dim, start
        )

    def element(self, source: Tensor) -> Tensor:
        return self._stand_in(source, self._moved(source, source))

    def shared(self, source: Tensor) -> Tensor:
        # Moved once for all pieces: it is no piece's own, so keeping it does not grow with the mini-batch.
        if id(source) not in self._shared:
            self._shared[id(source)] = self._moved(source, source)
        return self._stand_in(source, self._shared[id(source)])

    def at_home(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream.left()

    def _stand_in(self, source: Tensor, taken: Tensor, dim: int | None = None, start: int = 0) -> Tensor:
        if not source.requires_grad:
            return taken
        leaf = taken.detach().requires_grad_()
        self.inputs.append(InputLeaf(source, leaf, dim, start))
        return leaf

    def _moved(self, taken: Tensor, source: Tensor) -> Tensor:
        """What was taken of the source, on the device; a copy where that is wanted."""
        if self._stream is None:
            return self._copied(self._sent(taken), source)
        if self._stream.can_send(taken):
            return self._stream.send(taken)
        # Read from where the device computes, and maybe written there just before.
        with self.at_home():
            return self._copied(self._sent(taken), source)

    def _sent(self, taken: Tensor) -> Tensor:
        if self._device is None or taken.device == self._device:
            return taken
        with torch.no_grad():
            is_safe = copies_asynchronously(self._device) and taken.is_pinned()
            return taken.to(self._device, non_blocking=is_safe)

    def _copied(self, taken: Tensor, source: Tensor) -> Tensor:
        return taken.detach().clone() if self._copies and _may_share(taken, source) else taken


def _may_share(taken: Tensor, source: Tensor) -> bool:
    """May the two share memory? Nested and sparse tensors have no storage that could be asked."""
    if not (is_strided(taken) and is_strided(source)):
        return taken.device == source.device
    return taken.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
