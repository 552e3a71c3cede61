"""What the hooks tell of phases and steps, and that none of them stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils.checkpoint import checkpoint

from anybatch.memory.phases import Phase, PhaseHooks

STEP = ["forward", "other", "backward", "other", "optimizer", "step", "other"]


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.modules: list[nn.Module] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.optimizers: list[Optimizer] = []

    def phase_begins(self, phase: Phase) -> None:
        self.told.append(phase.value)

    def forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self.modules.append(module)
        self.inputs.append(inputs)

    def forward_ends(self, module: nn.Module, outputs: Any) -> None:
        self.outputs.append(outputs)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)

    def step_ends(self) -> None:
        self.told.append("step")


@contextmanager
def listening(*modules: nn.Module) -> Iterator[Heard]:
    """Listens to some modules, or to all."""
    heard = Heard()
    hooks = PhaseHooks(modules, heard)
    hooks.install()
    try:
        yield heard
    finally:
        hooks.remove()


def net_and_optimizer() -> tuple[nn.Sequential, SGD]:
    """A small net, and its optimizer."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    return net, SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("is_named", [True, False])
def test_phases_of_plain_steps(is_named: bool) -> None:
    """A plain loop is forward, backward, optimizer, with other in between; inner modules are no phase."""
    net, optimizer = net_and_optimizer()
    with listening(*([net] if is_named else [])) as heard:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert heard.told == STEP * 3
    assert heard.modules == [net] * 3
    assert heard.optimizers == [optimizer] * 3


def test_module_that_is_not_named_is_not_followed() -> None:
    """With modules named, others are none of the phases; a named one inside of others is."""
    net, _ = net_and_optimizer()
    with listening(net[2]) as heard:
        net(torch.ones(2, 3))
    assert heard.modules == [net[2]]


def test_inputs_and_outputs_are_told() -> None:
    """The listener gets what a module was given, by position and by name, and what it returned."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Tensor]:
            return {"sum": x + y}

    net, x, y = Sum(), torch.ones(2), torch.ones(2)
    with listening(net) as heard:
        outputs = net(x, y=y)
    ((args, kwargs),) = heard.inputs
    assert args[0] is x
    assert kwargs["y"] is y
    assert heard.outputs[0] is outputs


@pytest.mark.parametrize(
    "wrap",
    [lambda y: y, lambda y: (y,), lambda y: {"a": [y, None]}, lambda y: (y.detach(), y, y * 2)],
    ids=["tensor", "tuple", "nested", "several"],
)
def test_backward_of_any_outputs(wrap: Callable[[Tensor], Any]) -> None:
    """Backward is seen once, whatever container the outputs come in."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            return wrap(self.layer(x))

    net = Net()
    with listening(net) as heard:
        outputs = net(torch.ones(2, 3))
        leaves = torch.utils._pytree.tree_leaves(outputs)
        sum(leaf.sum() for leaf in leaves if isinstance(leaf, Tensor)).backward()
    assert heard.told == ["forward", "other", "backward", "other"]


def test_accumulation_and_evaluation() -> None:
    """Several backwards before a step belong to one step; without gradients there is only forward."""
    net, optimizer = net_and_optimizer()
    with listening(net) as heard:
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            net(torch.ones(2, 3))
    assert heard.told == [*STEP[:4] * 2, *STEP[4:], "forward", "other"]


def test_recomputation_belongs_to_backward() -> None:
    """A checkpointed module that runs again during backward is no forward."""
    net, _ = net_and_optimizer()
    with listening() as heard:
        checkpoint(net, torch.ones(2, 3), use_reentrant=False).sum().backward()
    assert heard.told == ["forward", "other", "backward", "other"]


def test_backward_twice_and_through_a_backward() -> None:
    """A second backward of one graph, and one of a gradient, are phases of their own."""
    net, _ = net_and_optimizer()
    with listening(net) as heard:
        x = torch.ones(2, 3, requires_grad=True)
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.sum().backward()
    assert heard.told[:6] == ["forward", "other", "backward", "other", "backward", "other"]


def test_optimizer_in_backward_ends_one_step() -> None:
    """Optimizers that step in hooks of the backward end one step with it, however many there are."""
    net, _ = net_and_optimizer()
    for parameter in net.parameters():
        optimizer = SGD([parameter], lr=0.1)

        def step(_: Tensor, optimizer: SGD = optimizer) -> None:
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(step)
    with listening(net) as heard:
        net(torch.ones(2, 3)).sum().backward()
        net(torch.ones(2, 3)).sum().backward()
    assert heard.told == ["forward", "other", "backward", "step", "other"] * 2


def test_closure_of_an_optimizer() -> None:
    """What an optimizer's closure does is told inside of its step, which goes on afterwards."""
    net, _ = net_and_optimizer()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    with listening(net) as heard:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert heard.told == [
        "optimizer", "forward", "optimizer", "backward", "optimizer", "step", "other",
    ]  # fmt: skip


class Failing(torch.autograd.Function):
    """Passes its input on, and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("backward")


def _fail_in_forward(net: nn.Sequential, optimizer: SGD) -> None:
    net(torch.ones(2, 99))


def _fail_in_backward(net: nn.Sequential, optimizer: SGD) -> None:
    with_failure = nn.Sequential(net[0])
    with_failure.register_forward_pre_hook(lambda module, args: (Failing.apply(args[0]),))
    with_failure(torch.ones(2, 3, requires_grad=True)).sum().backward()


class FailingSGD(SGD):
    """An optimizer that can't step."""

    def step(self, closure: Any = None) -> None:
        raise KeyError("step")


def _fail_in_step(net: nn.Sequential, optimizer: SGD) -> None:
    FailingSGD(net.parameters(), lr=0.1).step()


FAILURES: dict[str, tuple[Callable[[nn.Sequential, SGD], None], str]] = {
    "forward": (_fail_in_forward, "forward"),
    "backward": (_fail_in_backward, "backward"),
    "optimizer": (_fail_in_step, "optimizer"),
}


@pytest.mark.parametrize(("fail", "phase"), FAILURES.values(), ids=list(FAILURES))
def test_failure_keeps_its_phase_until_the_next(
    fail: Callable[[nn.Sequential, SGD], None], phase: str
) -> None:
    """After a failure the phase is the one that failed; the next step is told as if nothing had been."""
    net, optimizer = net_and_optimizer()
    with listening() as heard:
        with pytest.raises((RuntimeError, KeyError)):
            fail(net, optimizer)
        assert heard.told[-1] == phase
        heard.told.clear()
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert heard.told in (STEP, ["other", *STEP])


def test_several_listeners_are_told_the_same() -> None:
    """Two sets of hooks, one inside of the other, hear the same, and the outer one goes on alone."""
    net, optimizer = net_and_optimizer()

    def step() -> None:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    with listening() as outer:
        with listening() as inner:
            step()
        step()
    assert inner.told == STEP
    assert outer.told == STEP * 2


@pytest.mark.parametrize("is_named", [True, False])
def test_no_hook_stays(is_named: bool) -> None:
    """Afterwards modules, optimizers, outputs and torch's global hooks are as before (Rule 7)."""
    net, optimizer = net_and_optimizer()
    before = [dict(_global_forward_hooks), dict(_global_forward_pre_hooks)]
    optimizers = [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)]
    with listening(*([net] if is_named else [])):
        kept = net(torch.ones(2, 3))
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        later = net(torch.ones(2, 3))
    assert [dict(_global_forward_hooks), dict(_global_forward_pre_hooks)] == before
    assert [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)] == optimizers
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in net.modules())
    assert all(not each._forward_hooks_always_called for each in net.modules())
    assert not kept._backward_hooks
    assert not later._backward_hooks


def test_graph_has_no_more_nodes() -> None:
    """Watching adds no node to the autograd graph: what reads it sees the user's own."""
    net, _ = net_and_optimizer()
    plain = net(torch.ones(2, 3)).grad_fn
    with listening(net):
        watched = net(torch.ones(2, 3)).grad_fn
    assert type(watched) is type(plain)
    assert [type(each) for each, _ in watched.next_functions] == [
        type(each) for each, _ in plain.next_functions
    ]


def test_compiled_module_is_not_compiled_again() -> None:
    """A named module that is compiled is compiled once, with and without hooks on its outside."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net, _ = net_and_optimizer()
    compiled = torch.compile(net, backend=backend)
    compiled(torch.ones(2, 3))
    with listening(compiled) as heard:
        compiled(torch.ones(2, 3)).sum().backward()
    compiled(torch.ones(2, 3))
    assert len(graphs) == 1
    assert heard.told == ["forward", "other", "backward", "other"]


def test_functional_transforms_run() -> None:
    """Under `torch.func` a module runs as it does without hooks."""
    net, _ = net_and_optimizer()
    x = torch.ones(2, 3)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(net, parameters, (x,))
        return output.sum()

    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    expected = torch.func.grad(loss)(parameters)
    with listening(net):
        found = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(found, expected)
