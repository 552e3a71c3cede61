"""Dropout and other noise: repeatable, drawn piece by piece, and right on average."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

from .whole import gradients

Step = Callable[..., Tensor]
STEPS: dict[str, Callable[[nn.Module], Step]] = {
    "dropout": lambda net: lambda x, label: F.cross_entropy(F.dropout(net(x)), label),
    "two denominators": lambda net: (
        lambda x, label: F.cross_entropy(F.dropout(net(x)), label) + net(x).square().mean()
    ),
    "noise of its own": lambda net: (
        lambda x, label: F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), label, reduction="sum")
    ),
    "noise of numpy and Python": lambda net: (
        lambda x, label: F.cross_entropy(net(x) * (np.random.rand() + random.random()), label)
    ),
    "layers": lambda net: (
        lambda x, label: F.cross_entropy(nn.Sequential(net, nn.AlphaDropout(), nn.Dropout1d(0.2))(x), label)
    ),
}
QUIET = "ignore::anybatch.errors.InexactWarning"


def _batch(rows: int) -> dict[str, Tensor]:
    label = torch.randint(4, (rows,))
    label[1::3] = -100
    return {"x": torch.randn(rows, 3), "label": label}


def _seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def _outcome(call: Callable[..., Any], net: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, ...]:
    """What one call from a fixed seed leaves: its loss, the gradients, and the next random numbers."""
    _seed()
    net.zero_grad()
    loss = call(**batch)
    following = torch.rand(1), torch.tensor([np.random.rand(), random.random()])
    return loss, *gradients(net.parameters()), *following


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 1), (4, 8)])
def test_repeat_with_the_same_seed_is_bit_identical(name: str, rows: int, ub_size: int) -> None:
    """The first call with its probe, later calls and another decorator's first one: all the same bits."""
    net, batch = nn.Linear(3, 4), _batch(rows)
    step = STEPS[name](net)
    call = anybatch.apply(["x", "label"], ub_size)(step)
    first = _outcome(call, net, batch)
    for again in (call, call, anybatch.apply(["x", "label"], ub_size)(step)):
        assert all(torch.equal(a, b) for a, b in zip(first, _outcome(again, net, batch), strict=True))


@pytest.mark.parametrize("name", ["dropout", "noise of its own"])
@pytest.mark.filterwarnings(QUIET)
def test_looking_at_the_loss_draws_nothing(name: str) -> None:
    """The probe leaves the random state alone: with and without it the pieces draw the same numbers."""
    net, batch = nn.Linear(3, 4), _batch(10)
    batch["label"].clamp_(min=0)
    step = STEPS[name](net)
    probed = _outcome(anybatch.apply(["x", "label"], 4)(step), net, batch)
    unprobed = _outcome(anybatch.apply(["x", "label"], 4, on_inexact="ignore")(step), net, batch)
    assert all(torch.equal(a, b) for a, b in zip(probed, unprobed, strict=True))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand(1, generator=generator).item(),
    ),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: generator.random()),
    "Python": (lambda: random.Random(3), lambda generator: generator.random()),
}


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("kind", GENERATORS)
def test_looking_at_the_loss_leaves_generators_of_the_users_own(kind: str) -> None:
    """A generator beside the default ones is put back after each look, and after a call that failed."""
    make, draw = GENERATORS[kind]
    net, batch = nn.Linear(3, 4), _batch(10)

    def call_with(generator: Any, *, fails: bool = False, **options: Any) -> Callable[..., Any]:
        def step(x: Tensor, label: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x) * draw(generator), label)
            if fails:
                raise KeyError("after drawing")
            return loss

        return anybatch.apply(["x", "label"], 4, **options)(step)

    found = []
    for options in ({}, {"on_inexact": "ignore"}):
        generator = make()
        net.zero_grad()
        call_with(generator, **options)(**batch)
        found.append((net.weight.grad, draw(generator)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    assert found[0][1] == found[1][1]
    generator = make()
    with pytest.raises(KeyError):
        call_with(generator, fails=True)(**batch)
    assert draw(generator) == draw(make())


def _squares(weight: Tensor) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return (F.dropout(x, 0.1) @ weight - y).square().mean()

    return step


def _uneven_batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Ten rows of which the last three lie far from where they should, so that a wrong weight shows."""
    weight = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    return weight, {"x": torch.rand(10, 3) + 0.5, "y": torch.tensor([0.0] * 7 + [20.0] * 3)}


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(("ub_size", "sizes"), [(4, [4, 3, 3]), (1, [1] * 10), (9, [5, 5])])
def test_pieces_draw_in_row_order(ub_size: int, sizes: list[int]) -> None:
    """A call is the loop that draws a mask for one piece after the other, each weighted with its rows."""
    weight, batch = _uneven_batch()
    step = _squares(weight)
    torch.manual_seed(5)
    expected = torch.zeros(3)
    for x, y in zip(batch["x"].split(sizes), batch["y"].split(sizes), strict=True):
        expected += torch.autograd.grad(step(x, y) * len(x) / 10, weight)[0]
    torch.manual_seed(5)
    anybatch.apply(["x", "y"], ub_size)(step)(**batch)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings(QUIET)
def test_mean_gradient_over_seeds_is_that_of_the_whole() -> None:
    """Over many seeds the gradient under dropout averages to its expectation on the whole mini-batch.

    With masks of a tenth, E[((d x)w - y) d x] = (xw - y) x + x^2 w / 9: what each row adds, in arithmetic.
    The test can tell: pieces that weigh the same whatever their rows would lie many standard errors away.
    """
    weight, batch = _uneven_batch()
    x, y = batch["x"], batch["y"]
    with torch.no_grad():
        rows = 2 * ((x @ weight - y)[:, None] * x + x.square() * weight / 9)
    call = anybatch.apply(["x", "y"], 4)(_squares(weight))
    found = []
    for seed in range(300):
        torch.manual_seed(seed)
        weight.grad = None
        call(**batch)
        assert weight.grad is not None
        found.append(weight.grad)
    errors = torch.stack(found).std(0) / len(found) ** 0.5
    mean = torch.stack(found).mean(0)
    assert (((mean - rows.mean(0)) / errors).abs() < 4).all()
    by_pieces = torch.stack([piece.mean(0) for piece in rows.split([4, 3, 3])]).mean(0)
    assert (((by_pieces - rows.mean(0)) / errors).abs() > 8).all()
