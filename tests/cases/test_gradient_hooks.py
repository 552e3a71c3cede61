"""Hooks that act on finished gradients run once per call, not once per piece (pytorch/pytorch#124523)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch


def _stepping_net(
    optimizer_of: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> tuple[nn.Module, list[str]]:
    torch.manual_seed(1)
    net, calls = nn.Linear(4, 1), []
    for name, parameter in net.named_parameters():
        optimizer = optimizer_of([parameter])

        def hook(p: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            calls.append(name)

        parameter.register_post_accumulate_grad_hook(hook)
    return net, calls


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("ub_size", [1, 2, 3, 8])
def test_optimizer_in_a_hook_steps_once_per_call(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], ub_size: int
) -> None:
    """An optimizer step in a post-accumulate hook sees the whole gradient, once per parameter and call."""
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    expected, _ = _stepping_net(optimizer)
    net, calls = _stepping_net(optimizer)
    call = anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.mse_loss(net(x), y))
    for _ in range(3):
        F.mse_loss(expected(x), y).backward()
        call(x=x, y=y)
    assert sorted(calls) == ["bias"] * 3 + ["weight"] * 3
    torch.testing.assert_close(list(net.parameters()), list(expected.parameters()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ub_size", [1, 2, 3, 8])
def test_tensor_hook_on_a_parameter_sees_the_whole_gradient_once(ub_size: int) -> None:
    """A hook that changes a parameter's gradient, nonlinearly too, acts on the sum of the pieces."""
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    seen: list[Tensor] = []
    net.weight.register_hook(lambda g: seen.append(g.clone()) or g.clamp(-0.1, 0.1) + 1)
    F.mse_loss(net(x), y).backward()
    expected, expected_seen = net.weight.grad.clone(), seen.pop()
    net.zero_grad()
    anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.mse_loss(net(x), y))(x=x, y=y)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected_seen, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)
