"""A failed attempt is gone before the next one begins (pytorch/pytorch#27600, #18853)."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.fit.auto import Auto

ROWS, MOST_ROWS = 8, 2


def out_of_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")


class Attempts:
    """A function that runs out of memory with more rows than fit, and watches what it has made."""

    def __init__(self, fails_in: str) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 1)
        self.fails_in = fails_in
        self.made: list[tuple[int, weakref.ref[Tensor]]] = []
        self.alive: list[int] = []

    def parameters(self) -> list[Tensor]:
        return [*self.first.parameters(), *self.second.parameters()]

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        self.alive += [rows for rows, tensor in self.made if rows > MOST_ROWS and tensor() is not None]
        inner = self.first(x).tanh()
        self.made.append((len(x), weakref.ref(inner)))
        if len(x) > MOST_ROWS:
            if self.fails_in == "forward":
                out_of_memory()
            inner.register_hook(out_of_memory)
        outputs = self.second(inner)
        self.made.append((len(x), weakref.ref(outputs)))
        return F.mse_loss(outputs, y)


@pytest.fixture
def without_garbage_collection() -> object:
    """Nothing may wait for the collector: what is alive is held."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(attempts: Attempts, outer: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    x, y = torch.randn(ROWS, 5), torch.randn(ROWS, 1)
    loss = F.mse_loss(attempts.second(attempts.first(x).tanh()), y)
    expected = torch.autograd.grad(loss, attempts.parameters())
    call = anybatch.apply(["x", "y"], ub_size=Auto(prefer="largest"))(attempts.run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anybatch.errors.InexactWarning)
        outer(lambda: call(x=x, y=y))
    for parameter, gradient in zip(attempts.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("place", ["plain", "inside except"])
def test_nothing_of_a_failed_attempt_is_alive_in_the_next(fails_in: str, place: str) -> None:
    """Whenever the function begins, no tensor of a failed run is alive, also inside an `except` block."""

    def outer(call: Callable[[], Tensor]) -> Tensor:
        if place == "plain":
            return call()
        try:
            raise KeyError("the caller's own")
        except KeyError:
            return call()

    attempts = Attempts(fails_in)
    run(attempts, outer)
    assert max(rows for rows, _ in attempts.made) == ROWS
    assert attempts.alive == []
