"""Calls with gradients disabled: the loss and outputs of the whole mini-batch, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactWarning

ROWS, UB_SIZE, TOLERANCE = 24, 4, 1e-12

pytestmark = pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])


@pytest.fixture
def net() -> nn.Module:
    """A classifier of 5 features into 4 classes."""
    return nn.Linear(5, 4).double()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Rows with labels, some of them ignored."""
    y = torch.randint(4, (ROWS,))
    y[5:8] = -100
    return {"x": torch.randn(ROWS, 5, dtype=torch.float64), "y": y}


def test_evaluation_keeps_gradients(
    net: nn.Module, batch: dict[str, Tensor], disabled: Callable[[], Any]
) -> None:
    """Evaluating after a training call gives the same loss, leaves gradients alone, and training goes on."""
    expected = F.cross_entropy(net(batch["x"]), batch["y"])
    (gradient,) = torch.autograd.grad(expected, net.weight)
    call = anybatch.apply(["x", "y"], UB_SIZE)(lambda x, y: F.cross_entropy(net(x), y))
    call(**batch)
    kept, value = net.weight.grad, net.weight.grad.clone()
    with disabled():
        loss = call(**batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=0)
    assert net.weight.grad is kept
    assert torch.equal(kept, value)
    assert not kept.is_inference()
    call(**batch)
    torch.testing.assert_close(net.weight.grad, 2 * gradient, rtol=0, atol=TOLERANCE)


def test_first_call_evaluates(net: nn.Module, batch: dict[str, Tensor], disabled: Callable[[], Any]) -> None:
    """A function whose first call has gradients disabled gives the loss of the whole and no gradient."""
    expected = F.cross_entropy(net(batch["x"]), batch["y"]).detach()
    with disabled():
        loss = anybatch.apply(["x", "y"], UB_SIZE)(lambda x, y: F.cross_entropy(net(x), y))(**batch)
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    assert net.weight.grad is None


def test_outputs_for_numpy_in_one_piece(
    net: nn.Module, batch: dict[str, Tensor], disabled: Callable[[], Any]
) -> None:
    """A function that turns its outputs into an array works where the mini-batch is one piece."""
    with disabled():
        loss, probabilities = anybatch.apply(["x", "y"], ROWS)(_with_array(net))(**batch)
    _assert_whole(net, batch["x"], batch["y"], loss, probabilities)


def test_outputs_for_numpy_in_pieces(
    net: nn.Module, batch: dict[str, Tensor], disabled: Callable[[], Any]
) -> None:
    """A function that turns its outputs into an array works in pieces, and says that it weighs by rows."""
    batch["y"] = torch.arange(ROWS) % 4
    with disabled(), pytest.warns(InexactWarning, match="taken for a mean over rows"):
        loss, probabilities = anybatch.apply(["x", "y"], UB_SIZE)(_with_array(net))(**batch)
    _assert_whole(net, batch["x"], batch["y"], loss, probabilities)


def test_outputs_for_numpy_with_a_weight(
    net: nn.Module, batch: dict[str, Tensor], disabled: Callable[[], Any]
) -> None:
    """With `weight=` the loss is exact without a graph, and nothing is warned."""
    call = anybatch.apply(["x", "y"], UB_SIZE, weight=lambda y: (y != -100).sum())(_with_array(net))
    with disabled():
        loss, probabilities = call(**batch)
    _assert_whole(net, batch["x"], batch["y"], loss, probabilities)


def _with_array(net: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, np.ndarray]]:
    def evaluate(x: Tensor, y: Tensor) -> tuple[Tensor, np.ndarray]:
        outputs = net(x)
        return F.cross_entropy(outputs, y), outputs.softmax(1).numpy()

    return evaluate


def _assert_whole(net: nn.Module, x: Tensor, y: Tensor, loss: Tensor, probabilities: np.ndarray) -> None:
    with torch.no_grad():
        outputs = net(x)
    torch.testing.assert_close(loss, F.cross_entropy(outputs, y), rtol=TOLERANCE, atol=0)
    assert isinstance(probabilities, np.ndarray)
    np.testing.assert_allclose(probabilities, outputs.softmax(1).numpy(), rtol=TOLERANCE)
