"""The yardstick of gradient tests: plain PyTorch on the whole mini-batch, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

IGNORED = -100
ROWS, UB_SIZE = 10, 4

Gradients = list[Tensor | None]


def net() -> nn.Sequential:
    """A small network, always with the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(*, ignores: bool = True) -> dict[str, Tensor]:
    """Ten rows with labels; where some are ignored, pieces count differently many of them."""
    torch.manual_seed(0)
    x, labels = torch.randn(ROWS, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 0, 1, 0, 1, 1, 0, 1])
    if ignores:
        labels[[2, 3, 6]] = IGNORED
    return {"x": x, "y": labels}


def gradients(leaves: Iterable[Tensor]) -> Gradients:
    """Copies of the leaves' gradients."""
    return [None if leaf.grad is None else leaf.grad.to_dense().clone() for leaf in leaves]


def clear(leaves: Iterable[Tensor]) -> None:
    """Sets every gradient to None."""
    for leaf in leaves:
        leaf.grad = None


def assert_same_gradients(expected: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> None:
    """None where None is expected, else within 1e-10 of the largest expected gradient (Rule 1)."""
    assert [one is None for one in expected] == [one is None for one in got]
    largest = max((float(one.abs().max()) for one in expected if one is not None), default=1.0)
    for one, other in zip(expected, got, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-10 * largest)
