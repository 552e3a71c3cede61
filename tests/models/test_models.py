"""Models of `transformers` with random weights: their own losses, cut unevenly and into single rows.

Run with `-s` to see the measured errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

from .architectures import COUNTED, EXACT, IGNORED, REFUSED, Architecture
from .precision import DoubleThroughout

Gradients = dict[str, Tensor | None]

# Rows of the mini-batch and the limit of a piece: 3+2+2, single rows, 5+4.
CUTS = ((7, 3), (5, 1), (9, 5))

pytestmark = pytest.mark.models


def _whole(
    step: Callable[..., Tensor], model: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, Gradients]:
    model.zero_grad(set_to_none=True)
    loss = step(**batch)
    loss.backward()
    gradients = _gradients(model)
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters()}


def _gradient_error(expected: Gradients, got: Gradients) -> float:
    """The largest difference of a gradient, relative to the call's largest gradient (Rule 1)."""
    distances = [0.0]
    for name, gradient in expected.items():
        other = got[name]
        if gradient is None or other is None:
            assert gradient is other, f"{name}: {gradient} became {other}"
        else:
            assert other.isfinite().all(), f"{name} is not finite"
            distances.append(float((gradient - other).abs().max()))
    return max(distances) / max(float(g.abs().max()) for g in expected.values() if g is not None)


def _loss_error(expected: Tensor, got: Tensor) -> float:
    return float((expected.double() - got.double()).abs() / expected.double().abs())


def _assert_exact(
    architecture: Architecture, model: nn.Module, batch: dict[str, Tensor], step: Any, ub_size: int
) -> None:
    loss, gradients = _whole(step, model, batch)
    with DoubleThroughout():
        true_loss, true_gradients = _whole(step, model, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_in_pieces = anybatch.apply(list(batch), ub_size=ub_size)(step)(**batch)
    error, own = _gradient_error(gradients, _gradients(model)), _gradient_error(true_gradients, gradients)
    loss_error, own_of_loss = _loss_error(loss, loss_in_pieces), _loss_error(true_loss, loss)
    cut = f"{len(next(iter(batch.values())))}/{ub_size}"
    print(f"\n{architecture.name:28s} {cut:5s} gradients {error:.1e} (own {own:.1e})", end="")
    print(f"  loss {loss_error:.1e} (own {own_of_loss:.1e})", end="")
    assert error <= max(1e-10, 2 * own)
    assert loss_error <= max(1e-10, 2 * own_of_loss, torch.finfo(loss.dtype).eps)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [pytest.param(a, mode, id=f"{a.name}-{mode}") for a in EXACT for mode in a.modes],
)
def test_model_is_exact(architecture: Architecture, mode: str, rows: int, ub_size: int) -> None:
    """A model's own loss in micro-batches has the gradients of the whole mini-batch (Rule 1)."""
    model = architecture.build(mode)
    torch.manual_seed(0)
    _assert_exact(architecture, model, architecture.batch(rows), architecture.step(model), ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_model_told_the_number_of_items_is_exact(rows: int, ub_size: int) -> None:
    """A loss over the given number of tokens of the whole mini-batch is a sum, and is kept as one."""
    model = COUNTED.build("train")
    torch.manual_seed(0)
    batch = COUNTED.batch(rows)
    items = (batch["labels"][:, 1:] != IGNORED).sum()

    def step(**batch: Tensor) -> Tensor:
        return model(**batch, num_items_in_batch=items).loss

    _assert_exact(COUNTED, model, batch, step, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [pytest.param(a, mode, id=f"{a.name}-{mode}") for a in REFUSED for mode in a.modes],
)
def test_model_whose_rows_are_coupled_is_refused(
    architecture: Architecture, mode: str, rows: int, ub_size: int
) -> None:
    """A loss over pairs of rows, or over the batch's routing, is refused and leaves no gradient."""
    model = architecture.build(mode)
    torch.manual_seed(0)
    batch = architecture.batch(rows)
    with pytest.raises(InexactError) as refusal:
        anybatch.apply(list(batch), ub_size=ub_size)(architecture.step(model))(**batch)
    assert refusal.value.causes
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda architecture: architecture.name)
def test_refused_model_in_one_piece_is_plain_pytorch(architecture: Architecture) -> None:
    """Where everything fits in one piece nothing is refused."""
    model = architecture.build("train")
    torch.manual_seed(0)
    _assert_exact(architecture, model, architecture.batch(5), architecture.step(model), 5)
