"""Clipping after the call sees the gradient of the whole mini-batch once (huggingface/transformers#986)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anybatch

from .whole import whole

X = torch.tensor([[8.0, 0.0], [0.0, 2.0]], dtype=torch.float64)


def _step(w: Tensor) -> object:
    return lambda x: (x @ w).mean()


def test_clipped_gradient_has_the_known_values() -> None:
    """Two rows, one by one: the norm before is that of (4, 1), and the direction is kept."""
    w = torch.zeros(2, requires_grad=True)
    anybatch.apply(["x"], ub_size=1)(_step(w))(x=X)
    norm = nn.utils.clip_grad_norm_([w], 1.0)
    assert norm.item() == pytest.approx(17**0.5, abs=1e-10)
    assert w.grad.tolist() == pytest.approx([4 / 17**0.5, 1 / 17**0.5], abs=1e-6)


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("ub_size", [1, 2, 3, 7])
def test_clipping_equals_clipping_the_whole(clip: str, ub_size: int) -> None:
    """Clipping by norm and by value gives what it gives on the whole mini-batch."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = 5 * torch.randn(7, 3)
    parameters = list(net.parameters())

    def step(x: Tensor) -> Tensor:
        return net(x).square().mean()

    def clipped() -> list[Tensor]:
        if clip == "norm":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        else:
            nn.utils.clip_grad_value_(parameters, 0.05)
        return [p.grad.clone() for p in parameters]

    _, expected = whole(step, {"x": x}, parameters)
    for parameter, gradient in zip(parameters, expected, strict=True):
        parameter.grad = gradient
    expected_clipped = clipped()
    net.zero_grad()
    anybatch.apply(["x"], ub_size=ub_size)(step)(x=x)
    torch.testing.assert_close(clipped(), expected_clipped, rtol=1e-10, atol=1e-12)
