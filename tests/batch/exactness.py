"""The yardstick for batches of every kind: the same function on the whole mini-batch, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import anybatch
from anybatch.batch import balanced, lay_out

CUTS = [(10, 4), (9, 1), (12, 3), (7, 6), (1, 1)]
"""Rows of a mini-batch, and the most that a micro-batch may have."""

TOLERANCE = 1e-10


def assert_exact(
    step: Callable[..., Any],
    batch: dict[str, Any],
    leaves: Iterable[Tensor] | nn.Module,
    ub_size: int,
    **options: Any,
) -> None:
    """A call in micro-batches gives the loss and gradients of the whole mini-batch (Rule 1), in float64."""
    leaves = list(leaves.parameters() if isinstance(leaves, nn.Module) else leaves)
    expected_loss, expected = _run(step, batch, leaves)
    loss, got = _run(
        anybatch.apply(list(batch), ub_size=ub_size, **options)(step), batch, leaves, backward=False
    )
    scale = max(float(gradient.abs().max()) for gradient in expected)
    assert scale > 0
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype in (torch.float64, torch.complex128)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * scale)


def _run(
    step: Callable[..., Any], batch: dict[str, Any], leaves: Sequence[Tensor], *, backward: bool = True
) -> tuple[Tensor, list[Tensor]]:
    for leaf in leaves:
        leaf.grad = None
    loss = step(**batch)
    if backward:
        loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return loss.detach(), [_dense(gradient) for gradient in gradients if gradient is not None]


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.values() if gradient.is_nested else gradient
    return gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient


def pieces_of(value: Any, ub_size: int, **options: Any) -> list[Any]:
    """The pieces of a mini-batch with one entry, as the function gets them."""
    layout = lay_out({"batch": value}, **options)
    pieces, start = [], 0
    for rows in balanced(layout.rows, ub_size, layout.amounts):
        pieces.append(layout.cut(start, start + rows)["batch"])
        start += rows
    return pieces
