"""The yardstick of the techniques: two steps of AdamW in plain PyTorch, and the same with a technique."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import anybatch

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


def two_steps(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    entered: AbstractContextManager[None] | None = None,
    ub_size: int | None = None,
    loss: Losses = squares,
) -> tuple[list[Tensor], list[Tensor]]:
    """Trains a model for two steps, in pieces where `ub_size` says so.

    Returns:
        The gradients of the first step, and all tensors of the model at the end.
    """
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.05)
    gradients: list[Tensor] = []
    with entered or nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            _backward(model, x, y, ub_size, loss)
            gradients = gradients or [
                each.grad.clone() for each in model.parameters() if each.grad is not None
            ]
            optimizer.step()
    return gradients, [each.detach().clone() for each in model.state_dict().values()]


def _backward(model: nn.Module, x: Tensor, y: Tensor, ub_size: int | None, loss: Losses) -> None:
    if ub_size is None:
        loss(model, x, y).backward()
    else:
        anybatch.apply(["x", "y"], ub_size=ub_size)(loss)(model, x=x, y=y)


def assert_equal(expected: list[Tensor], got: list[Tensor]) -> None:
    """Bit for bit the same tensors."""
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_close(expected: list[Tensor], got: list[Tensor], tolerance: float = 1e-10) -> None:
    """The same up to rounding, relative to the largest value."""
    assert len(expected) == len(got)
    scale = max(float(each.abs().max()) for each in expected)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def saved_bytes(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """A loss and the bytes that its graph saved, each storage once, without parameters and leaves."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not tensor.is_leaf:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    return loss, sum(storages.values())
