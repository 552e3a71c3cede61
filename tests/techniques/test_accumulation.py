"""Several calls for one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.techniques.training import assert_close, assert_equal, squares
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

import anybatch
from anybatch.errors import TechniqueError
from anybatch.techniques import Accumulation, Setting


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 1, dtype=torch.float64)


def trained(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], float]:
    """Plain PyTorch: one step of AdamW for each batch, and one of the scheduler."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    for x, y in batches:
        optimizer.zero_grad()
        squares(model, x, y).backward()
        optimizer.step()
        scheduler.step()
    return [each.detach() for each in model.parameters()], scheduler.get_last_lr()[0]


def joined(sizes: list[int], steps: int) -> list[tuple[Tensor, Tensor]]:
    """The mini-batches that windows stand for."""
    x, y = rows(sum(sizes))
    windows = [sum(sizes[at : at + steps]) for at in range(0, len(sizes), steps)]
    return list(zip(x.split(windows), y.split(windows), strict=True))


SIZES = [
    ([4, 4, 4, 4], 2),
    ([4, 4, 2], 2),
    ([2, 2, 2, 2, 2], 2),
    ([5, 1, 3, 3, 7, 2, 1], 3),
    ([3, 5], 1),
    ([2, 3], 9),
]


@pytest.mark.parametrize(("sizes", "steps"), SIZES)
@pytest.mark.parametrize("ub_size", [None, 1, 2, 4])
def test_windows_are_mini_batches_of_all_their_rows(
    sizes: list[int], steps: int, ub_size: int | None
) -> None:
    """Even, uneven and short windows, in pieces or not, step as plain PyTorch does on all their rows."""
    expected, rate = trained(joined(sizes, steps))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    x, y = rows(sum(sizes))
    cut = anybatch.apply(["x", "y"], ub_size=ub_size)(squares) if ub_size else None
    with Accumulation(steps).window(optimizer, scheduler) as window:
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            with window.call(rows=len(a)):
                cut(model, x=a, y=b) if cut else squares(model, a, b).backward()
    assert_close(expected, [each.detach() for each in model.parameters()])
    assert window.steps == -(-len(sizes) // steps)
    assert scheduler.get_last_lr() == [rate]
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("sizes", [[4, 4], [4, 3]])
def test_gradients_before_a_step_are_those_of_the_window(sizes: list[int]) -> None:
    """What is clipped before a step is the gradient of all rows, and the step takes what clipping left."""
    x, y = rows(sum(sizes))
    plain, model = network(), network()
    squares(plain, x, y).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [each.detach().clone() for each in model.parameters()]
    seen: list[Tensor] = []

    def clip() -> None:
        seen.extend(each.grad.clone() for each in model.parameters() if each.grad is not None)
        for each in model.parameters():
            each.grad = torch.ones_like(each)

    window = Accumulation(2).window(optimizer, before_step=clip)
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        with window.call(len(a)):
            squares(model, a, b).backward()
    assert_close([each.grad for each in plain.parameters() if each.grad is not None], seen)
    assert_equal([each - 1 for each in before], [each.detach() for each in model.parameters()])


def test_calls_of_one_size_are_added_up_where_they_are() -> None:
    """No second copy of the gradients: the same tensor grows."""
    model = network()
    x, y = rows(4)
    window = Accumulation(9).window(torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for _ in range(2):
        with window.call(4):
            squares(model, x, y).backward()
        found.append(model[0].weight.grad)  # type: ignore[index]
    assert found[0] is found[1]


@pytest.mark.parametrize("size", [3, 4])
def test_a_call_that_fails_does_not_count(size: int) -> None:
    """After an error the window is as before the call, and goes on."""
    expected, _ = trained(joined([4, 2], 2))
    model = network()
    x, y = rows(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    window = Accumulation(2).window(optimizer)

    def step(a: Tensor, b: Tensor) -> None:
        with window.call(len(a)):
            anybatch.apply(["x", "y"], ub_size=2)(squares)(model, x=a, y=b)

    def fail() -> None:
        with window.call(size):
            raise KeyError

    step(x[:4], y[:4])
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    with pytest.raises(KeyError):
        fail()
    assert_equal(before, [each.grad for each in model.parameters() if each.grad is not None])
    step(x[4:], y[4:])
    assert window.steps == 1
    assert_close(expected, [each.detach() for each in model.parameters()])


def test_an_error_in_the_loop_makes_no_step() -> None:
    """A window that is left by an error is not stepped."""
    model = network()
    before = [each.detach().clone() for each in model.parameters()]
    window = Accumulation(2).window(torch.optim.SGD(model.parameters(), lr=1.0))

    def fail() -> None:
        with window:
            with window.call(4):
                squares(model, *rows(4)).backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert window.steps == 0
    assert_equal(before, [each.detach() for each in model.parameters()])


def test_gradients_from_before_and_unused_parameters() -> None:
    """Old gradients are dropped; a parameter that some calls do not use counts 0 in them."""
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}).double()
    x, y = rows(6)
    first = squares(model["a"], x[:4], y[:4])
    second = squares(model["a"], x[4:], y[4:]) + squares(model["b"], x[4:], y[4:])
    expected = torch.autograd.grad((4 * first + 2 * second) / 6, list(model.parameters()))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    seen: list[Any] = []
    with Accumulation(2).window(
        torch.optim.SGD(model.parameters(), lr=1.0),
        before_step=lambda: seen.extend(each.grad.clone() for each in model.parameters()),  # type: ignore[union-attr]
    ) as window:
        with window.call(4):
            squares(model["a"], x[:4], y[:4]).backward()
        with window.call(2):
            (squares(model["a"], x[4:], y[4:]) + squares(model["b"], x[4:], y[4:])).backward()
    assert_close(list(expected), seen)


def test_a_scaler_makes_the_step_and_the_scheduler_waits_for_one() -> None:
    """Steps under a scaler are those without; where it leaves one out the scheduler does not step."""
    expected, rate = trained(joined([4, 2], 2))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    scaler = GradScaler("cpu", init_scale=8.0)
    x, y = rows(6)
    window = Accumulation(2).window(optimizer, scheduler, scaler=scaler)
    for a, b in zip(x.split([4, 2]), y.split([4, 2]), strict=True):
        with window.call(len(a)):
            scaler.scale(squares(model, a, b)).backward()
    assert_close(expected, [each.detach() for each in model.parameters()])
    assert scheduler.get_last_lr() == [rate]
    for factor in (1.0, float("inf")):
        with window.call(4):
            scaler.scale(squares(model, x[:4], y[:4]) * factor).backward()
    assert scheduler.get_last_lr() == [rate]
    assert scaler.get_scale() == 4.0
    assert_close(expected, [each.detach() for each in model.parameters()])


@pytest.mark.parametrize("count", [0, -1, True, None, float("nan"), float("inf")])
def test_rows_that_are_none_are_refused(count: Any) -> None:
    """Every call has rows."""
    window = Accumulation(2).window(torch.optim.SGD(network().parameters(), lr=1.0))
    with pytest.raises(TechniqueError, match="each call counts by its rows"), window.call(count):
        raise AssertionError("not reached")


def test_it_needs_an_optimizer() -> None:
    """Without steps there is nothing to count (Rule 8)."""
    with pytest.raises(TechniqueError, match="without one"):
        Accumulation(2).check(Setting(nn.Identity()))
