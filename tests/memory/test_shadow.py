"""What an optimizer's step takes, against the step itself on real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from anybatch.memory.shadow import OptimizerCost, assumed_cost, optimizer_cost
from anybatch.memory.symbolic import Untraceable
from anybatch.memory.tracker import Tracker

_KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "Adadelta": torch.optim.Adadelta,
}


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 3))


def _fill_gradients(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("kind", _KINDS)
def test_cost_is_that_of_the_real_step(kind: str) -> None:
    """State and peak of the first step, which makes the state, and of the second, are those of real steps."""
    net = _net()
    optimizer = _KINDS[kind](list(net.parameters()))
    for _ in range(2):
        _fill_gradients(net)
        foreseen = optimizer_cost(optimizer)
        with Tracker() as tracker:
            optimizer.step()
        assert foreseen == OptimizerCost(tracker.live_bytes, tracker.peak_bytes)


def test_optimizer_and_parameters_are_untouched() -> None:
    """Weights, state, gradients, counters of schedules and hooks do not notice the question."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps: list[object] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    _fill_gradients(net)
    optimizer.step()
    weights = copy.deepcopy(net.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    gradients = [parameter.grad for parameter in net.parameters()]
    steps.clear()
    optimizer_cost(optimizer)
    assert steps == []
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(
        torch.equal(value, state["state"][index][name])
        for index, each in optimizer.state_dict()["state"].items()
        for name, value in each.items()
    )
    assert all(before is each.grad for before, each in zip(gradients, net.parameters(), strict=True))
    schedule.step()


def test_hooks_that_all_optimizers_share_do_not_see_the_shadow() -> None:
    """A hook for every optimizer's step is not called for a shadow."""
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        optimizer_cost(torch.optim.SGD(_net().parameters(), lr=0.1))
    finally:
        handle.remove()
    assert seen == []


def test_attributes_of_an_optimizer_come_along_unless_bound_to_it() -> None:
    """An optimizer of the caller's own may keep functions; its own methods are the shadow's."""

    class Own(torch.optim.SGD):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(parameters, lr=0.1)
            self.scale, self.update = torch.neg, self.change

        def change(self, parameter: Tensor) -> None:
            self.state[parameter]["seen"] = self.scale(parameter)

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                getattr(self, "update", self.change)(parameter)

    net = _net()
    optimizer = Own(net.parameters())
    assert optimizer_cost(optimizer).state_bytes == 4 * (16 * 32 + 32 + 32 * 3 + 3)
    assert len(optimizer.state) == 0


def test_groups_and_frozen_parameters() -> None:
    """Only parameters that are trained have state, whichever group they are in."""
    net = _net()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters()}, {"params": net[1].parameters(), "momentum": 0.9}], lr=0.1
    )
    assert optimizer_cost(optimizer).state_bytes == 4 * (3 * 32 + 3)


def test_step_that_needs_a_closure_is_refused() -> None:
    """LBFGS can't be asked."""
    with pytest.raises(Untraceable, match="closure"):
        optimizer_cost(torch.optim.LBFGS(_net().parameters()))


def test_assumed_cost_is_that_of_adam() -> None:
    """Two numbers per trained parameter, a counter each, and the temporaries of one parameter on a CPU."""
    net = _net()
    net[1].bias.requires_grad_(False)
    numbers = 16 * 32 + 32 + 3 * 32
    cost = assumed_cost([*net.parameters(), *net.parameters()])
    assert cost.state_bytes == 4 * (2 * numbers + 3)
    assert (
        cost.step_peak_bytes
        == optimizer_cost(
            torch.optim.Adam([each for each in net.parameters() if each.requires_grad])
        ).step_peak_bytes
    )
    assert assumed_cost([torch.ones(3)]) == OptimizerCost(0, 0)
