"""Hooks on parameters run once per call, on the gradient of the whole mini-batch, and stay registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import UB_SIZE, assert_same_gradients, batch, gradients, net


def train(model: nn.Module, is_cut: bool, rows: dict[str, Tensor]) -> None:
    """One backward of a mean over the labels that are not ignored, whole or in pieces."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    if is_cut:
        anybatch.apply(["x", "y"], UB_SIZE)(function)(**rows)
    else:
        function(**rows).backward()


def whole_and_in_pieces(prepare: Callable[[nn.Module, list[Any]], None]) -> list[tuple[list[Any], Any]]:
    """What hooks recorded, and the gradients: of the plain whole first, then of the call in pieces."""
    found = []
    for is_cut in (False, True):
        model, seen = net(), []
        prepare(model, seen)
        train(model, is_cut, batch())
        found.append((seen, gradients(model.parameters())))
    return found


def test_clamp_of_a_gradient_of_two() -> None:
    """A hook that clamps to 1 gives 1 where two pieces each bring 1, and not 2."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    weight.register_hook(lambda gradient: gradient.clamp(max=1.0))
    anybatch.apply(["x"], 1)(lambda x: (weight * x).sum())(x=torch.ones(2, dtype=torch.float64))
    assert weight.grad is not None
    assert weight.grad.item() == 1.0


def test_hooks_see_the_whole_gradient_once() -> None:
    """A hook is called once, also in the first call of a function, with the gradient of all rows."""

    def prepare(model: nn.Module, seen: list[Any]) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.clone()))

    (expected, _), (seen, _) = whole_and_in_pieces(prepare)
    by_shape = {tuple(one.shape): one for one in seen}
    assert len(seen) == len(expected) == 4
    assert_same_gradients(expected, [by_shape[tuple(one.shape)] for one in expected])


def test_hooks_follow_each_other() -> None:
    """Hooks run in the order of their registration, each on what the one before returned."""

    def prepare(model: nn.Module, seen: list[Any]) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
            parameter.register_hook(lambda gradient: None)
            parameter.register_hook(lambda gradient: gradient.sign() * gradient.square() + 1)

    (_, expected), (_, got) = whole_and_in_pieces(prepare)
    assert_same_gradients(expected, got)


def test_hooks_stay_registered() -> None:
    """After a call each hook is there, and runs once in a plain backward."""
    model, seen = net(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    train(model, True, batch())
    seen.clear()
    train(model, False, batch())
    assert sorted(seen) == ["after"] * 4 + ["hook"] * 4


def test_handles_still_remove() -> None:
    """The handle of a hook that was set aside during a call removes it afterwards."""
    model, seen = net(), []
    handles = [model[0].weight.register_hook(lambda gradient: seen.append("hook"))]
    handles.append(model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("after")))
    train(model, True, batch())
    for handle in handles:
        handle.remove()
    seen.clear()
    train(model, True, batch())
    train(model, False, batch())
    assert seen == []


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_that_removes_itself(kind: str) -> None:
    """A hook that removes itself runs once over all calls, as in plain PyTorch."""
    model, seen = net(), []

    def hook(_: Tensor) -> None:
        seen.append(1)
        handle.remove()

    handle = getattr(model[0].weight, kind)(hook)
    for is_cut in (True, True, False):
        train(model, is_cut, batch())
    assert seen == [1]


def test_post_accumulate_hooks_come_after_tensor_hooks() -> None:
    """A post-accumulate hook sees the earlier gradient plus what the tensor hooks made of the new one."""

    def prepare(model: nn.Module, seen: list[Any]) -> None:
        parameter = model[2].bias
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    (expected, _), (seen, _) = whole_and_in_pieces(prepare)
    assert_same_gradients(expected, seen)


def test_post_accumulate_hook_of_the_first_layer_sees_all_gradients() -> None:
    """The hook of the parameter that comes last in backward finds every gradient in place."""

    def prepare(model: nn.Module, seen: list[Any]) -> None:
        def hook(_: Tensor) -> None:
            seen.extend(gradients(list(model.parameters())[2:]))

        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[0].weight.register_post_accumulate_grad_hook(hook)

    (expected, _), (seen, _) = whole_and_in_pieces(prepare)
    assert_same_gradients(expected, seen)


def test_post_accumulate_hook_may_take_the_gradient() -> None:
    """A post-accumulate hook that uses up the gradient leaves None."""

    def prepare(model: nn.Module, seen: list[Any]) -> None:
        def hook(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        seen.append(model)

    ((expected,), _), ((model,), got) = whole_and_in_pieces(prepare)
    assert got == [None] * 4
    assert_same_gradients(
        [p.detach() for p in expected.parameters()], [p.detach() for p in model.parameters()]
    )


def test_hook_on_a_leaf_input() -> None:
    """A hook on a leaf in the mini-batch runs once, with the gradient of all rows."""
    model, found = net(), []
    for is_cut in (False, True):
        rows, seen = batch(), []
        rows["x"].requires_grad_().register_hook(seen.append)
        rows["x"].register_post_accumulate_grad_hook(lambda leaf, seen=seen: seen.append(leaf.grad))
        train(model, is_cut, rows)
        found.append(seen)
    assert_same_gradients(*found)


def test_hook_on_a_tied_weight() -> None:
    """A weight that two modules share runs its hook once, on the sum of both uses."""
    first, second = nn.Linear(3, 3, bias=False).double(), nn.Linear(3, 3, bias=False).double()
    second.weight = first.weight
    seen: list[Tensor] = []
    first.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model = nn.Sequential(first, nn.Tanh(), second)
    train(model, False, batch())
    train(model, True, batch())
    assert_same_gradients(seen[:1], seen[1:])


def test_parameters_without_gradient_run_no_hook() -> None:
    """Where no gradient arrives no hook runs."""
    model, unused, seen = net(), nn.Linear(3, 3).double(), []
    unused.weight.register_hook(lambda gradient: seen.append(1))
    unused.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))

    def function(x: Tensor) -> Tensor:
        unused(x)
        return model(x).square().sum(1).mean()

    anybatch.apply(["x"], UB_SIZE)(function)(x=batch()["x"])
    assert seen == []


def test_evaluation_runs_no_hook() -> None:
    """With gradients disabled no hook runs, and all are there afterwards."""
    model, seen = net(), []
    model[0].weight.register_hook(lambda gradient: seen.append(1))
    with torch.no_grad():
        anybatch.apply(["x", "y"], UB_SIZE)(lambda x, y: F.cross_entropy(model(x), y))(**batch())
    assert seen == []
    train(model, False, batch())
    assert seen == [1]
