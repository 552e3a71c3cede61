"""Who scales the loss, who unscales the gradients, and when (microsoft/Swin-Transformer#311)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

import anybatch
from anybatch.errors import LossError

Step = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def single_precision() -> None:
    """Scaling is for float32 models and below."""
    torch.set_default_dtype(torch.float32)


def fresh(scale: float = 2.0**16) -> tuple[nn.Linear, torch.optim.Optimizer, GradScaler]:
    torch.manual_seed(1)
    model = nn.Linear(5, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=scale)


def regression(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 5), "y": torch.randn(rows, 1)}


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """What a user does after backward."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(("rows", "ub_size"), [(8, 2), (10, 4), (10, 9), (12, 3), (7, 1), (6, 8)])
def test_weights_after_a_clipped_step(rows: int, ub_size: int) -> None:
    """The step is that of the whole mini-batch, and the loss that the call returns is not scaled."""
    batch = regression(rows)
    whole, optimizer, scaler = fresh()
    expected = F.mse_loss(whole(batch["x"]), batch["y"])
    scaler.scale(expected).backward()
    clipped_step(whole, optimizer, scaler)

    model, optimizer, scaler = fresh()
    step = anybatch.apply(["x", "y"], ub_size=ub_size, scaler=scaler)(lambda x, y: F.mse_loss(model(x), y))
    loss = step(**batch)
    scaled = model.weight.grad.clone()
    clipped_step(model, optimizer, scaler)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.weight, whole.weight, rtol=0, atol=1e-6)
    assert scaled.abs().max() > 1e3, "gradients are left scaled, for `unscale_`"
    assert scaler.get_scale() == 2.0**16


def test_calls_accumulate() -> None:
    """Two calls before one step add up scaled gradients, as two backwards do."""
    first, second = regression(10), regression(7)
    model, _, scaler = fresh()
    whole = copy.deepcopy(model)
    for batch in (first, second):
        scaler.scale(F.mse_loss(whole(batch["x"]), batch["y"])).backward()
    step = anybatch.apply(["x", "y"], ub_size=4, scaler=scaler)(lambda x, y: F.mse_loss(model(x), y))
    step(**first)
    step(**second)
    torch.testing.assert_close(model.weight.grad, whole.weight.grad, rtol=1e-5, atol=0)


def overflowing(x: Tensor) -> Tensor:
    """Nothing in forward, and too large for float16 in the gradient of the row that holds a 7."""
    return x + (x.half() * 1e3).float() * (x == 7)


def test_overflow_in_one_piece_skips_one_step() -> None:
    """One step is skipped and the scale halved once; the next call trains."""
    model, optimizer, scaler = fresh()
    batch = regression(8)
    batch["x"][5, 2] = 7.0
    step = anybatch.apply(["x", "y"], ub_size=2, scaler=scaler)(
        lambda x, y: F.mse_loss(overflowing(x * model.weight).sum(1, keepdim=True), y)
    )
    with torch.no_grad():
        model.weight[0, 2] = 1.0
        before = model.weight.detach().clone()
    step(**batch)
    assert not model.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15
    optimizer.zero_grad()
    step(x=batch["x"].clamp(max=1), y=batch["y"])
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_disabled_scaler_changes_nothing() -> None:
    """With a disabled scaler gradients are bit-identical to those without one."""
    batch, gradients = regression(10), []
    for scaler in (None, GradScaler("cpu", enabled=False)):
        model, _, _ = fresh()
        step = anybatch.apply(["x", "y"], ub_size=4, scaler=scaler)
        step(lambda x, y, model=model: F.mse_loss(model(x), y))(**batch)
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda loss, scaler: scaler.scale(loss),
        lambda loss, scaler: scaler.scale(loss) / 4,
        lambda loss, scaler: scaler.scale(loss / 4) + 1,
        lambda loss, scaler: scaler._scale * loss,
    ],
    ids=["scaled", "divided after", "divided before", "by hand"],
)
@pytest.mark.parametrize("ub_size", [3, 20])
def test_loss_that_is_scaled_already_is_refused(spoil: Any, ub_size: int) -> None:
    """Twice scaled is an error that names the function; scaler and gradients are as before."""
    model, _, scaler = fresh()
    scaler.scale(torch.ones(()))
    before = copy.deepcopy(scaler.state_dict())

    def train_fn(x: Tensor, y: Tensor) -> Tensor:
        return spoil(F.mse_loss(model(x), y), scaler)

    with pytest.raises(LossError, match=r"train_fn.*scaled it itself"):
        anybatch.apply(["x", "y"], ub_size=ub_size, scaler=scaler)(train_fn)(**regression(10))
    assert model.weight.grad is None
    assert scaler.state_dict() == before


@pytest.mark.parametrize("reduce", [Tensor.mean, Tensor.sum])
def test_losses_of_rows_that_are_scaled_already_are_refused(reduce: Any) -> None:
    """The same where the losses of rows are scaled, and their mean or sum is taken then."""
    model, _, scaler = fresh()

    def train_fn(x: Tensor, y: Tensor) -> Tensor:
        return reduce(scaler.scale(F.mse_loss(model(x), y, reduction="none")))

    with pytest.raises(LossError, match=r"train_fn.*scaled it itself"):
        anybatch.apply(["x", "y"], ub_size=3, scaler=scaler)(train_fn)(**regression(10))
    assert model.weight.grad is None


def test_gradient_penalty_may_scale_within() -> None:
    """A scaled loss from which the function takes gradients itself, and unscales them, is no scaled loss."""
    batch = regression(10)
    model, _, scaler = fresh(2.0**6)
    whole = copy.deepcopy(model)

    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        errors = F.mse_loss(model(x), y, reduction="none").sum(1)
        x = x.detach().requires_grad_()
        inner = scaler.scale(model(x).tanh().sum())
        (gradient,) = torch.autograd.grad(inner, x, create_graph=True)
        return errors.mean() + (gradient / scaler.get_scale()).square().sum(1).mean()

    scaler.scale(penalised(whole, **batch)).backward()
    step = anybatch.apply(["x", "y"], ub_size=4, scaler=scaler)
    step(lambda x, y: penalised(model, x, y))(**batch)
    torch.testing.assert_close(model.weight.grad, whole.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_used", [False, True])
def test_failure_leaves_the_scaler_as_it_was(is_used: bool) -> None:
    """An error in the last piece leaves a scaler that was never used unused, and the state of a used one."""
    model, optimizer, scaler = fresh()
    if is_used:
        scaler.scale(model(torch.randn(3, 5)).sum()).backward()
        scaler.unscale_(optimizer)
        model.zero_grad()
    before = copy.deepcopy(vars(scaler))
    calls: list[int] = []

    def train_fn(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 3:
            scaler.update(8.0)
            raise KeyError("a bug")
        return F.mse_loss(model(x), y)

    with pytest.raises(KeyError, match="a bug"):
        anybatch.apply(["x", "y"], ub_size=4, scaler=scaler, on_inexact="ignore")(train_fn)(**regression(10))
    assert vars(scaler) == before


def test_denominators_far_from_expected_are_counted_first() -> None:
    """Where far less counts than in the first call, scaled losses are no smaller than in the mini-batch."""
    torch.manual_seed(0)
    x, mask = torch.randn(64, 5), (torch.arange(64) % 8 == 0).float()
    largest: list[float] = []

    def masked(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        y = model(x)[:, 0]
        y.register_hook(lambda gradient: largest.append(float(gradient.abs().max())))
        return (y.square() * mask).sum() / mask.sum().clamp(min=1)

    model, _, scaler = fresh()
    whole = copy.deepcopy(model)
    scaler.scale(masked(whole, x, mask)).backward()
    limit = largest.pop()
    step = anybatch.apply(["x", "mask"], ub_size=8, scaler=scaler)(lambda x, mask: masked(model, x, mask))
    step(x=x, mask=torch.ones(64))
    for _ in range(2):
        largest.clear()
        model.zero_grad()
        step(x=x, mask=mask)
    torch.testing.assert_close(model.weight.grad, whole.weight.grad, rtol=1e-5, atol=1e-3)
    assert max(largest) == pytest.approx(limit, rel=0.01)


@pytest.mark.parametrize("value", [1024.0, True, "yes", object()])
def test_other_scalers_are_refused(value: Any) -> None:
    """What is no scaler is refused at decoration."""
    with pytest.raises(ValueError, match=r"`scaler` is a `torch\.amp\.GradScaler`"):
        anybatch.apply(["x"], scaler=value)


def test_evaluation_uses_no_scaler() -> None:
    """With gradients disabled nothing is scaled, and an unused scaler stays unused."""
    model, _, scaler = fresh()
    batch = regression(10)
    step = anybatch.apply(["x", "y"], ub_size=4, scaler=scaler)(lambda x, y: F.mse_loss(model(x), y))
    with torch.no_grad():
        loss = step(**batch)
        torch.testing.assert_close(loss, F.mse_loss(model(batch["x"]), batch["y"]))
    assert scaler._scale is None


def test_verify_compares_unscaled() -> None:
    """`verify` finds a scaled call exact: it compares gradients without the scale."""
    model, _, scaler = fresh()
    step = anybatch.apply(["x", "y"], ub_size=4, scaler=scaler)(lambda x, y: F.mse_loss(model(x), y))
    assert anybatch.verify(step, **regression(10))
    assert scaler._scale is None
