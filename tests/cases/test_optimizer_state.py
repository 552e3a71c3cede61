"""Optimizer state appears at the first step, so that forward and backward alone do not show it."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.memory.shadow import optimizer_cost


def test_state_is_foreseen_and_nothing_is_stepped() -> None:
    """AdamW's two moments are counted before they exist; weights, state and gradients stay as they are."""
    x, y = torch.randn(16, 64, dtype=torch.float32), torch.randn(16, 64, dtype=torch.float32)
    net = nn.Linear(64, 64, dtype=torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    weights = copy.deepcopy(net.state_dict())
    parameter_bytes = 4 * (64 * 64 + 64)
    foreseen = optimizer_cost(optimizer)
    # One counter for each of weight and bias.
    assert foreseen.state_bytes == 2 * parameter_bytes + 2 * torch.get_default_dtype().itemsize
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert len(optimizer.state) == 0
    assert all(parameter.grad is None for parameter in net.parameters())

    F.mse_loss(net(x), y).backward()
    optimizer.step()
    state_bytes = sum(
        value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values()
    )
    assert foreseen.state_bytes == state_bytes
    assert optimizer_cost(optimizer).state_bytes == 0
