"""Tests of `anybatch.fit.belongings`: a run on fakes leaves none behind."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch

kept_globally: Any = None


class Trainer:
    """Keeps state in attributes, a list, a dict and a deque."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1).double()
        self.last: Any = None
        self.losses: list[Any] = []
        self.by_name: dict[str, Any] = {"best": 7.0}
        self.recent: deque[Any] = deque([1.0], maxlen=3)

    @anybatch.apply(["x"], ub_size="auto")
    def step(self, x: Tensor) -> Tensor:
        """Keeps the loss everywhere."""
        global kept_globally
        loss = self.model(x).square().mean()
        self.last = kept_globally = loss.detach()
        self.losses.append(loss.detach())
        self.by_name["last"] = loss.detach()
        self.recent.append(loss.detach())
        return loss


def test_fakes_do_not_stay_in_state_of_the_function() -> None:
    """Attributes, lists, dicts, deques and globals hold real tensors only after the first call."""
    trainer = Trainer()
    trainer.step(x=torch.randn(8, 3, dtype=torch.float64))
    held = [trainer.last, kept_globally, *trainer.losses, *trainer.by_name.values(), *trainer.recent]
    assert {type(value) for value in held} <= {Tensor, float}
    assert trainer.by_name["best"] == 7.0
    torch.stack(trainer.losses)


def test_fakes_do_not_stay_in_closures() -> None:
    """A variable of an outer function that the step rebinds holds a real tensor."""
    model, total = nn.Linear(3, 1).double(), torch.zeros((), dtype=torch.float64)

    @anybatch.apply(["x"], ub_size="auto")
    def step(x: Tensor) -> Tensor:
        nonlocal total
        loss = model(x).square().mean()
        total = total + loss.detach()
        return loss

    loss = step(x=torch.randn(8, 3, dtype=torch.float64))
    assert type(total) is Tensor
    assert float(total) >= float(loss)


class Entry:
    """One line of a log."""

    def __init__(self, loss: Tensor) -> None:
        self.losses = [loss]


def test_fakes_do_not_stay_in_tuples_that_a_list_holds() -> None:
    """What a step wraps before it keeps it is gone after the run on fakes, also where that run breaks off."""
    for reads_value in (False, True):
        model = nn.Linear(3, 1).double()
        log: list[tuple[Any, ...]] = []

        @anybatch.apply(["x"], ub_size="auto")
        def step(x: Tensor, model: nn.Module, log: list[Any], reads_value: bool) -> Tensor:
            loss = model(x).square().mean()
            log.append(({"loss": loss.detach()}, Entry(loss.detach())))
            if reads_value:
                loss.item()
            return loss

        step(torch.randn(8, 3, dtype=torch.float64), model, log, reads_value)
        assert {type(loss) for by, entry in log for loss in (by["loss"], *entry.losses)} == {Tensor}


class Hidden:
    """Keeps a list where nobody looks for it."""

    __slots__ = ("losses",)

    def __init__(self) -> None:
        self.losses: list[Tensor] = []


def test_fakes_that_stay_are_told_although_others_were_put_back() -> None:
    """A fake in an attribute that can't be found is warned of, whatever else was given back."""
    model, hidden, found = nn.Linear(3, 1).double(), Hidden(), list[Tensor]()

    @anybatch.apply(["x"], ub_size="auto")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        hidden.losses.append(loss.detach())
        found.append(loss.detach())
        return loss

    with pytest.warns(anybatch.errors.InexactWarning, match="keeps tensors beyond its call"):
        step(x=torch.randn(8, 3, dtype=torch.float64))
    assert {type(loss) for loss in found} == {Tensor}
