"""Scratch memory of convolutions on a host, as far as it is foreseen.

oneDNN computes in layouts of its own: it copies what it is given, and what it gives back, between these and
the tensors' own. What it has no kernels for, torch unfolds into a matrix first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CONVOLUTIONS", "scratch_bytes"]

CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default})
_OF_ONEDNN = frozenset({torch.float32, torch.bfloat16, torch.float16})


def scratch_bytes(operator: Any, args: Sequence[Any], result: Any) -> int:
    """What a convolution takes beside its tensors while it runs.

    Error: an estimate from above, for torch 2.13. Where tensors lie in a layout of oneDNN's, it takes less.
    """
    outputs = [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]
    if outputs[0].device.type not in ("cpu", "meta"):
        return 0
    if outputs[0].dtype not in _OF_ONEDNN:
        return _unfolded_bytes(args)
    given, made = [_bytes(each) for each in args[:2] if isinstance(each, Tensor)], _bytes(outputs[0])
    if operator is torch.ops.aten.convolution_backward.default:
        return given[0] + max(given[1], made)
    return given[0] + made


def _unfolded_bytes(args: Sequence[Any]) -> int:
    weight = next(each for each in args[1:3] if isinstance(each, Tensor) and each.ndim == args[0].ndim)
    return _bytes(args[0]) * math.prod(weight.shape[2:])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
