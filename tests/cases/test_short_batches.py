"""Every batch of a loader is trained on, however short, and stepped once (huggingface/transformers#39659)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch


def _batches(rows: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(rows, 3), torch.randn(rows, 1)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def _trained(
    batches: list[tuple[Tensor, Tensor]],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    run: Callable[[nn.Module, Tensor, Tensor], None],
) -> tuple[list[Tensor], float]:
    torch.manual_seed(1)
    net = nn.Linear(3, 1)
    optimizer = optimizer_of(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for x, y in batches:
        optimizer.zero_grad()
        run(net, x, y)
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
        scheduler.step()
    return [p.detach().clone() for p in net.parameters()], optimizer.param_groups[0]["lr"]


def _whole(net: nn.Module, x: Tensor, y: Tensor) -> None:
    F.mse_loss(net(x), y).backward()


def _in_pieces(ub_size: int) -> Callable[[nn.Module, Tensor, Tensor], None]:
    def run(net: nn.Module, x: Tensor, y: Tensor) -> None:
        anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.mse_loss(net(x), y))(x=x, y=y)

    return run


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (9, 4), (7, 6), (3, 4)])
@pytest.mark.parametrize("ub_size", [1, 2, 3, 8])
def test_loader_with_a_short_last_batch(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], rows: int, batch_size: int, ub_size: int
) -> None:
    """Weights and learning rate after an epoch are those of training on whole batches."""
    batches = _batches(rows, batch_size)
    expected, expected_rate = _trained(batches, optimizer, _whole)
    weights, rate = _trained(batches, optimizer, _in_pieces(ub_size))
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
    assert rate == expected_rate


def test_learning_rate_after_three_batches_is_known() -> None:
    """Three batches are three scheduler steps: 0.1 halves to 0.0125."""
    _, rate = _trained(_batches(10, 4), OPTIMIZERS["sgd"], _in_pieces(2))
    assert rate == pytest.approx(0.0125)


def test_one_decorated_function_serves_every_batch() -> None:
    """The same decorated function takes batches of any size, smaller than its pieces too."""
    batches = _batches(10, 4)
    torch.manual_seed(1)
    net = nn.Linear(3, 1)
    call = anybatch.apply(["x", "y"], ub_size=3)(lambda x, y: F.mse_loss(net(x), y))
    for x, y in batches:
        net.zero_grad()
        _whole(net, x, y)
        expected = net.weight.grad.clone()
        net.zero_grad()
        call(x=x, y=y)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-10)
