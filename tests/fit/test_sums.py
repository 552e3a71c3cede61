"""Sums of gradients: what they are added up in, and in which blocks."""

from __future__ import annotations

import pytest
import torch

from anybatch.fit.sums import ends_block, is_low, is_single, plus, wide_dtype


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128),
    ],
)
def test_dtype_of_sums(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Sums have 32 bits at least; dtypes that have them stay."""
    assert wide_dtype(dtype) == wide
    assert is_low(dtype) == (dtype != wide)
    assert is_single(dtype) == (dtype in (torch.float32, torch.complex64))


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [(1, []), (16, []), (17, [15]), (32, [15]), (40, [15, 31]), (10_000, list(range(99, 9_999, 100)))],
)
def test_ends_of_blocks(pieces: int, ends: list[int]) -> None:
    """Blocks of 16 pieces, later of as many as there are blocks; what is left at the end is no block."""
    assert [index for index in range(pieces) if ends_block(index, pieces)] == ends


def _sparse(rows: list[int], values: list[float], dtype: torch.dtype) -> torch.Tensor:
    indices, numbers = torch.tensor([rows]), torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(indices, numbers, (3,), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("total_is_sparse", [False, True])
@pytest.mark.parametrize("gradient_is_sparse", [False, True])
def test_sum_of_layouts(dtype: torch.dtype, total_is_sparse: bool, gradient_is_sparse: bool) -> None:
    """Dense and sparse gradients add up; only sparse ones stay sparse, and coalesced."""
    first, second = _sparse([0, 2], [1.0, 2.0], dtype), _sparse([2, 2], [3.0, 4.0], dtype)
    total = plus(None, first if total_is_sparse else first.to_dense(), 1.0)
    total = plus(total, second if gradient_is_sparse else second.to_dense(), 0.5)
    assert total.dtype == torch.float32
    assert total.is_sparse == (total_is_sparse and gradient_is_sparse)
    assert not total.is_sparse or total.is_coalesced()
    assert total.to_dense().tolist() == [1.0, 0.0, 5.5]


def test_first_share_of_a_sum() -> None:
    """The first gradient of a sum gets its share, too."""
    assert plus(None, torch.tensor([2.0, 4.0]), 1.5).tolist() == [3.0, 6.0]
