"""Adding up the gradients of many pieces without losing digits.

A sum of K pieces in bfloat16 loses what is smaller than 1/256 of it, and in float32 its rounding error grows
with K. So gradients of less than 32 bits are added up in float32, piece by piece (4 bytes per element). Those
of float32 are added up in blocks, once there are more pieces than a block has, which takes one more copy of
the gradients; but not where the graph rounds to less than 32 bits anyway, under autocast say.
"""

import math

import torch
from torch import Tensor

_LEAST_BLOCK = 16


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are added up: float32 at least, complex as they are."""
    return torch.promote_types(dtype, torch.float32)


def is_low(dtype: torch.dtype) -> bool:
    """Has a dtype less than 32 bits?"""
    return wide_dtype(dtype) != dtype


def is_single(dtype: torch.dtype) -> bool:
    """Has a dtype the digits of float32?"""
    return torch.finfo(dtype).eps == torch.finfo(torch.float32).eps


def takes_blocks(pieces: int) -> bool:
    """Are so many pieces added up in more than one block?"""
    return pieces > _LEAST_BLOCK


def ends_block(index: int, pieces: int) -> bool:
    """Is a piece the last of a block, with more to come? No more blocks than pieces in one, from 16 on.

    Source: N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14, 1993.
    """
    block = max(_LEAST_BLOCK, math.isqrt(pieces))
    return (index + 1) % block == 0 and index + 1 < pieces


def plus(total: Tensor | None, gradient: Tensor, share: float) -> Tensor:
    """The sum so far, and a share of a gradient; in place where that can be."""
    wide = wide_dtype(gradient.dtype)
    if total is None:
        # No copy where nothing changes: nobody else holds a gradient that the call let accumulate.
        return gradient.to(wide) if share == 1.0 else gradient.to(wide) * share
    if total.layout == gradient.layout == torch.strided:
        return total.add_(gradient, alpha=share)
    part = gradient.to(wide) * share
    if total.layout == gradient.layout:
        return (total + part).coalesce() if total.layout == torch.sparse_coo else total + part
    return total + part if total.layout == torch.strided else part + total
