"""Packed sequences, cut by row.

Their elements are interleaved: the first of all rows, then the second of those that have one, and so on, rows
in order of falling length. `sorted_indices` says which row of the batch is which; without it they are the
same::

    rows        a  a  a          sorted     0 1 2    batch_sizes  3 2 1
                b                           a c b
                c  c             data       a c b a c a
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from anybatch.batch.kinds import Container, Slicer


def _children(value: PackedSequence) -> list[tuple[str, Any]]:
    # The batch sizes stay on the host, wherever the rest goes.
    indices = [("sorted_indices", value.sorted_indices), ("unsorted_indices", value.unsorted_indices)]
    return [("data", value.data), *indices]


def _rebuild(value: PackedSequence, children: list[Any]) -> PackedSequence:
    data, in_order, back = children
    return type(value)(data, value.batch_sizes, in_order, back)


def _rows(value: PackedSequence, _dim: int) -> int:
    return int(value.batch_sizes[0])


def _cut(value: PackedSequence, _dim: int, start: int, stop: int) -> PackedSequence:
    if value.unsorted_indices is None:
        places, in_order = torch.arange(start, stop), None
    else:
        places = value.unsorted_indices[start:stop].cpu()
        in_order = torch.argsort(places)
        places = places[in_order]
        in_order = in_order.to(value.data.device)
    # Element `t` of the row at sorted place `p` exists where `p < batch_sizes[t]`, at `begins[t] + p`.
    exists = places < value.batch_sizes[:, None]
    exists = exists[exists.any(dim=1)]
    begins = value.batch_sizes.cumsum(0) - value.batch_sizes
    elements = (begins[: len(exists), None] + places)[exists]
    data = value.data.index_select(0, elements.to(value.data.device))
    return type(value)(data, exists.sum(dim=1), in_order)


def _lengths(value: PackedSequence) -> list[int]:
    ranks = torch.arange(_rows(value, 0))
    lengths = (ranks[:, None] < value.batch_sizes).sum(dim=1)
    back = value.unsorted_indices
    return (lengths if back is None else lengths[back.cpu()]).tolist()


def _join(values: list[PackedSequence]) -> PackedSequence:
    rows: list[Tensor] = []
    for value in values:
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        rows += (row[:length] for row, length in zip(padded, lengths.tolist(), strict=True))
    is_sorted = all(value.sorted_indices is None for value in values)
    return pack_sequence(rows, enforce_sorted=is_sorted)


CONTAINER = Container(_children, _rebuild, slicer=Slicer(_rows, _cut, _lengths, _join))
