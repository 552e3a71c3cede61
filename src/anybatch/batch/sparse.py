"""Sparse COO tensors, whose rows are along dim 0, their first sparse dim."""

import torch
from torch import Tensor

from anybatch.batch.kinds import CannotCut, Slicer


def _rows(value: Tensor, dim: int) -> int:
    if dim % value.ndim:
        raise CannotCut(f"is a sparse tensor, whose rows are along dim 0. Got dim {dim}. Transpose it.")
    if value.requires_grad and not value.is_coalesced():
        # Torch 2.13 has no derivative of narrow_copy for sparse gradients.
        raise CannotCut("is a sparse tensor that requires grad and is not coalesced. Give `x.coalesce()`.")
    return value.shape[0]


def _cut(value: Tensor, _dim: int, start: int, stop: int) -> Tensor:
    if not value.is_coalesced():
        return value.narrow_copy(0, start, stop - start)
    indices = value.indices()  # in order of their rows
    begin, end = torch.searchsorted(indices[0], indices.new_tensor([start, stop])).tolist()
    place = indices[:, begin:end].clone()
    place[0] -= start
    size = (stop - start, *value.shape[1:])
    return torch.sparse_coo_tensor(
        place, value.values()[begin:end], size, is_coalesced=True, check_invariants=False
    )


def _join(values: list[Tensor]) -> Tensor:
    joined = torch.cat(values)
    # In order of their rows, each of which is coalesced: so is the whole, which torch.cat doesn't know.
    return joined._coalesced_(all(value.is_coalesced() for value in values))


SPARSE = Slicer(_rows, _cut, join=_join)
