"""Functions with state, as in contrastive and self-distilling training: said, and named by `verify`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import InexactWarning


class _Queue(nn.Module):
    """Compares rows with those of calls before, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.register_buffer("queue", torch.randn(16, 4))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        keys = self.encoder(x)
        loss = (keys @ self.queue.clone().T).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[(torch.arange(len(x)) + self.at) % 16] = keys.detach()
        self.at = (self.at + len(x)) % 16
        return loss


class _Centre(nn.Module):
    """Takes a running mean of its outputs away, as DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        output = self.encoder(x)
        loss = (output - self.centre.clone()).square().mean()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * output.mean(0).detach())
        return loss


def _teacher() -> Callable[..., Tensor]:
    """A student, and a teacher that follows it within the function."""
    student = nn.Linear(3, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher.weight.lerp_(student.weight + 1, 0.1)
        return F.mse_loss(student(x), teacher(x))

    return step


STATES: dict[str, tuple[Callable[[], Callable[..., Tensor]], list[str]]] = {
    "queue": (_Queue, ["queue", "at"]),
    "running centre": (_Centre, ["centre"]),
    "teacher": (_teacher, ["teacher.weight"]),
}


@pytest.mark.parametrize("kind", STATES)
def test_state_is_said_by_apply(kind: str) -> None:
    """A function that changes buffers or parameters gives a warning that names them."""
    make, _ = STATES[kind]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        anybatch.apply(["x"], 4)(make())(x=torch.randn(10, 3))
    assert {one.category for one in said} == {InexactWarning}
    assert any(
        re.search(r"changes parameters \(Linear|buffers change .* \(_", str(one.message)) for one in said
    )


@pytest.mark.parametrize("kind", STATES)
def test_state_is_named_by_verify(kind: str) -> None:
    """`verify` names what is kept, and leaves it as it was."""
    make, names = STATES[kind]
    function = make()
    before = copy.deepcopy(function.state_dict()) if isinstance(function, nn.Module) else {}
    found = anybatch.verify(anybatch.apply(["x"], 4)(function), x=torch.randn(10, 3))
    assert not found.is_exact
    (cause,) = [cause for cause in found.causes if cause.startswith("The function keeps state")]
    assert all(name in cause for name in names)
    after = function.state_dict() if isinstance(function, nn.Module) else {}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_outside_of_the_function_is_exact() -> None:
    """The way out: compare with the queue in the function, and push to it once per mini-batch."""
    encoder, queue = nn.Linear(3, 4), torch.randn(16, 4)

    @anybatch.apply(["x"], 4)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        keys = encoder(x)
        return (keys @ queue.T).logsumexp(1).mean(), keys

    x = torch.randn(10, 3)
    expected = torch.autograd.grad((encoder(x) @ queue.T).logsumexp(1).mean(), encoder.weight)[0]
    _, keys = step(x=x)
    torch.testing.assert_close(encoder.weight.grad, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(keys, encoder(x).detach(), rtol=1e-10, atol=1e-12)
