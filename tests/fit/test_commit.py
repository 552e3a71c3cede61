"""What is accumulated is added to all leaves or to none, and never twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.fit.auto import Auto
from anybatch.fit.leaf import shares_memory
from anybatch.testing import fail_at

from .whole import UB_SIZE, assert_same_gradients, batch, clear, gradients, net


class Boom(Exception):
    """The user's own."""


def call_of(model: nn.Module, ub_size: int | Auto = UB_SIZE) -> Callable[..., Tensor]:
    return anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.cross_entropy(model(x), y))


def with_gradients() -> tuple[nn.Module, list[Tensor | None]]:
    """A network with gradients from earlier, and copies of these."""
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, gradients(model.parameters())


def operators_of(call: Callable[[], object]) -> int:
    with fail_at(1 << 40) as fault:
        call()
    return fault.seen


@pytest.mark.parametrize("place", range(4))
def test_failure_while_sums_are_written_is_made_good(place: int) -> None:
    """An error at any of the writes leaves every gradient added once."""
    rows, found = batch(), []
    for fails in (False, True):
        model, _ = with_gradients()
        tensors = [parameter.grad for parameter in model.parameters()]
        call = call_of(model)
        call(**rows)
        operators = operators_of(lambda call=call: call(**rows))
        with fail_at(operators - 4 + place if fails else 1 << 40) as fault:
            call(**rows)
        assert fault.failed_at == ("aten::copy_ (copy)" if fails else None)
        assert all(p.grad is one for p, one in zip(model.parameters(), tensors, strict=True))
        found.append(gradients(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_views_into_a_flat_buffer_stay_views() -> None:
    """Gradients that are views into one buffer are added to in the buffer."""
    model, rows = net(), batch()
    F.cross_entropy(model(rows["x"]), rows["y"]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]) + 1
    flat = torch.ones_like(expected)
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    call_of(model)(**rows)
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=1e-12)


def test_gradients_that_share_memory() -> None:
    """Two leaves whose gradients are views of one tensor get one share each, with every number of pieces.

    torch itself adds up wrongly here from the second backward on (2.13).
    """
    first, second = torch.randn(2, 3).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    rows = torch.randn(8, 6).double()

    def function(x: Tensor) -> Tensor:
        return (x * (first.view(-1) + second.view(6))).sum(1).square().mean()

    function(rows).backward()
    expected = gradients([first, second])
    for ub_size in (8, 4, 1):
        clear([first, second])
        call = anybatch.apply(["x"], ub_size=ub_size)(function)
        call(x=rows)
        assert_same_gradients(expected, gradients([first, second]))
        call(x=rows)
        assert_same_gradients([2 * one for one in expected], gradients([first, second]))


def test_gradient_that_somebody_keeps_stays_as_it_is() -> None:
    """What a hook inside of the graph has kept is not written to when earlier gradients are added."""
    weight, kept = torch.ones(2, 3, requires_grad=True), []
    weight.grad = torch.ones(2, 3)

    def function(x: Tensor) -> Tensor:
        flat = weight.view(-1)
        flat.register_hook(kept.append)
        return (flat * x).sum()

    anybatch.apply(["x"], ub_size=4)(function)(x=torch.ones(4, 6))
    assert kept[0].tolist() == [4.0] * 6
    assert weight.grad.tolist() == [[5.0] * 3] * 2


def test_shared_memory_is_seen() -> None:
    """A view of another tensor shares its memory; a tensor alone, and one in parts of its own, do not."""
    alone = torch.ones(4)
    assert not shares_memory(alone)
    assert shares_memory(alone.view(2, 2))
    assert not shares_memory(torch.ones(2, 2).to_sparse())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_that_removed_itself_in_a_failed_call_is_back(kind: str) -> None:
    """Hooks are as before the call when it fails, also those that had their turn."""
    model, seen = net(), []

    def once(_: Tensor) -> None:
        handle.remove()
        seen.append("hook")

    def fail(_: Tensor) -> None:
        if len(seen) == 1:
            raise Boom

    handle = getattr(model[0].weight, kind)(once)
    failing = getattr(model[2].bias, kind)(fail)
    call, rows = call_of(model), batch()
    with pytest.raises(Boom):
        call(**rows)
    failing.remove()
    call(**rows)
    call(**rows)
    assert seen == ["hook", "hook"]


def test_error_in_a_post_accumulate_hook_puts_gradients_back() -> None:
    """Gradients that were written already have their values again, in the tensors that they were."""
    model, before = with_gradients()
    tensors = [parameter.grad for parameter in model.parameters()]
    seen: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def fail(_: Tensor) -> None:
        raise Boom

    model[2].bias.register_post_accumulate_grad_hook(fail)
    with pytest.raises(Boom):
        call_of(model)(**batch())
    assert not torch.equal(seen[0], torch.ones_like(seen[0]))
    assert all(p.grad is one for p, one in zip(model.parameters(), tensors, strict=True))
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))


def test_post_accumulate_hook_is_not_run_again_when_memory_runs_out_in_it() -> None:
    """A hook may have made a step: the error comes through, and no smaller pieces are tried."""
    model, steps = net(), []

    def step(parameter: Tensor) -> None:
        steps.append(parameter)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        call_of(model, Auto())(**batch())
    assert len(steps) == 2
    assert gradients(model.parameters()) == [None] * 4


def test_hooks_stay_where_memory_runs_out_before_anything_runs() -> None:
    """A failure while gradients are set aside loses no hook."""
    model, seen = with_gradients()[0], []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(1))
    function: Callable[..., Tensor] = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    call, rows = anybatch.apply(["x", "y"], ub_size=UB_SIZE, on_inexact="ignore")(function), batch()
    for n in range(8):
        with fail_at(n), pytest.raises(RuntimeError, match="memory"):
            call(**rows)
        assert [len(p._backward_hooks or ()) for p in model.parameters()] == [1] * 4
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    call(**rows)
    assert len(seen) == 4


def test_requires_grad_is_put_back() -> None:
    """A function that froze a layer, and failed before it thawed it, leaves it as it was."""
    model = net()

    def function(x: Tensor, y: Tensor) -> Any:
        model[0].requires_grad_(False)
        raise Boom

    with pytest.raises(Boom):
        anybatch.apply(["x", "y"], ub_size=UB_SIZE)(function)(**batch())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("trait", "change"), [("shape", lambda g: g[:1]), ("dtype", lambda g: g.float())], ids=["shape", "dtype"]
)
def test_hook_that_returns_another_kind_of_gradient(trait: str, change: Callable[[Tensor], Tensor]) -> None:
    """It is an error that names the leaf, as in plain PyTorch, and gradients are as they were (Rule 3)."""
    model = nn.Linear(3, 2).double()
    model.weight.grad, model.bias.grad = torch.ones(2, 3).double(), torch.ones(2).double()
    model.bias.register_hook(change)
    step = anybatch.apply(["x"], ub_size=4)(lambda x: model(x).square().mean())
    with pytest.raises(RuntimeError, match=rf"{trait} .*bias"):
        step(torch.randn(10, 3, dtype=torch.float64))
    assert bool((model.weight.grad == 1).all())
    assert bool((model.bias.grad == 1).all())


def test_gradient_that_cannot_be_written_to() -> None:
    """One that is expanded gets its sum in a tensor of its own, and the others theirs in place."""
    model = nn.Linear(3, 2).double()
    model.weight.grad = weight = torch.ones(2, 3).double()
    model.bias.grad = torch.zeros((), dtype=torch.float64).expand(2)
    x = torch.randn(10, 3, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    anybatch.apply(["x"], ub_size=4)(lambda x: model(x).square().mean())(x)
    assert model.weight.grad is weight
    torch.testing.assert_close(model.weight.grad, expected[0] + 1)
    torch.testing.assert_close(model.bias.grad, expected[1])
