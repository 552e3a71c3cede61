"""`verify` leaves no trace (Rule 7): all that a call can change is as before, also after errors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactWarning

from .ingredients import Network, arguments, function_with, mini_batch

EVERYTHING = ("BatchNorm", "dropout", "inputs", "state", "loss")


def _bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.detach().clone().numpy().tobytes())


def _state_of(
    network: nn.Module, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """All that a call could change: identities, and the bits of values."""
    every = {**dict(network.named_parameters()), **dict(network.named_buffers()), **tensors}
    memory = {name: (id(tensor), tensor.data_ptr()) for name, tensor in every.items()}
    return {
        "memory": memory,
        "values": {name: _bits(tensor) for name, tensor in every.items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in every.items()},
        "gradients": {
            name: (id(tensor.grad), _bits(tensor.grad)) for name, tensor in every.items() if tensor.is_leaf
        },
        "hooks": {
            name: [
                dict(hooks or {}) for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
            ]
            for name, tensor in every.items()
            if tensor.is_leaf
        },
        "modes": [module.training for module in network.modules()],
        "attributes": [{**vars(module)} for module in network.modules()],
        "module hooks": [
            {key: dict(value) for key, value in vars(module).items() if "hooks" in key and value is not None}
            for module in network.modules()
        ],
        "optimizer": {
            key: _bits(value) if isinstance(value, Tensor) else value
            for state in optimizer.state.values()
            for key, value in state.items()
        },
        "random": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),
        "random place": np.random.get_state()[2],
        "filters": list(warnings.filters),
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
    }


def _trained(network: Network) -> torch.optim.Optimizer:
    """An optimizer with state, and gradients of which some are None and some belong to nobody."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    x, y = mini_batch().values()
    F.cross_entropy(network(x.to(network.inner.weight.dtype)), y).backward()
    optimizer.step()
    network.outer.weight.grad = None
    network.middle.bias.requires_grad_(False)
    network.inner.weight.register_hook(lambda gradient: 2 * gradient)
    network.inner.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.data.zero_())
    return optimizer


def _assert_no_trace(
    network: Network,
    tensors: dict[str, Tensor],
    run: Callable[[], Any],
    raises: type[Exception] | None = None,
) -> None:
    optimizer = _trained(network)
    torch.randn(3), np.random.randn(3), random.random()
    before = _state_of(network, tensors, optimizer)
    if raises is None:
        run()
    else:
        with pytest.raises(raises):
            run()
    after = _state_of(network, tensors, optimizer)
    for kind, value in before.items():
        assert after[kind] == value, kind


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("mixture", [(), EVERYTHING, *((each,) for each in EVERYTHING)], ids="+".join)
def test_nothing_is_left_behind(mixture: tuple[str, ...], double: bool) -> None:
    """After a verification everything is bit by bit as before, whatever the function does."""
    function, network = function_with(mixture)
    batch = arguments()
    step = anybatch.apply(["x", "y"], ub_size=4)(function)
    _assert_no_trace(network, batch, lambda: anybatch.verify(step, double=double, **batch))


@pytest.mark.parametrize("double", [False, True])
def test_nothing_is_left_behind_by_a_float32_call(double: bool) -> None:
    """The runs in float64 leave a float32 model where it was, in the same memory."""
    function, network = function_with(["BatchNorm", "dropout", "state", "loss"])
    network.float()
    batch = mini_batch()
    batch["x"] = batch["x"].float()
    step = anybatch.apply(list(batch), ub_size=4)(function)
    network.state.queue = network.state.queue.float()

    def run() -> None:
        found = anybatch.verify(step, double=double, **batch)
        assert len(found.causes) == 4

    _assert_no_trace(network, batch, run)


def test_graph_made_before_runs_backward_after() -> None:
    """A loss that the caller computed before, and whose graph holds the weights, still runs backward."""
    function, network = function_with(["dropout", "loss"])
    batch = mini_batch()
    loss = network(batch["x"]).square().sum()
    found = anybatch.verify(anybatch.apply(list(batch), ub_size=4)(function), double=True, **batch)
    assert not found.is_exact
    loss.backward()
    assert network.inner.weight.grad is not None


class Failure(Exception):
    """The user's own."""


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("call", range(8))
def test_nothing_is_left_behind_by_a_failure(call: int, double: bool) -> None:
    """The user's exception passes unchanged, from whichever of the calls on it comes, and leaves no trace."""

    class Calls:
        count = 0

    function, network = function_with(["BatchNorm", "dropout", "state"])
    batch = mini_batch()

    def failing(x: Tensor, y: Tensor) -> Tensor:
        loss = function(x, y)
        Calls.count += 1
        if Calls.count > call:
            network.eval()
            network.outer.weight.data.mul_(2)
            raise Failure
        return loss

    step = anybatch.apply(list(batch), ub_size=4)(failing)
    _assert_no_trace(network, batch, lambda: anybatch.verify(step, double=double, **batch), Failure)


def test_nothing_is_left_behind_by_a_failing_backward() -> None:
    """An exception in backward leaves all as it was."""
    function, network = function_with(["BatchNorm", "dropout"])
    batch = mini_batch()

    def failing(x: Tensor, y: Tensor) -> Tensor:
        loss = function(x, y)
        loss.register_hook(lambda gradient: 1 / 0)
        return loss

    step = anybatch.apply(list(batch), ub_size=4)(failing)
    _assert_no_trace(network, batch, lambda: anybatch.verify(step, **batch), ZeroDivisionError)


def test_what_the_function_does_to_its_model_is_undone() -> None:
    """Modes, frozen parameters, new attributes and hooks, and replaced weights are put back."""
    function, network = function_with([])
    batch = mini_batch()

    def meddling(x: Tensor, y: Tensor) -> Tensor:
        loss = function(x, y)
        network.eval()
        network.outer.bias.requires_grad_(False)
        network.visited = True
        network.register_buffer("extra", torch.zeros(1))
        network.inner.register_forward_hook(lambda *_: None)
        network.outer.weight.register_hook(lambda gradient: gradient)
        network.middle.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
        network.outer.weight.data = network.outer.weight.data * 2
        network.inner.bias.data.add_(1)
        return loss

    step = anybatch.apply(list(batch), ub_size=4)(meddling)
    _assert_no_trace(network, batch, lambda: anybatch.verify(step, **batch))


def test_gradient_of_an_entry_and_of_a_stray_leaf() -> None:
    """Leaves outside of modules keep the gradients that they had, object and values."""
    function, network = function_with([])
    batch = mini_batch()
    stray = torch.ones(6, dtype=torch.float64, requires_grad=True)
    for tensor in (stray, batch["x"].requires_grad_()):
        tensor.grad = torch.randn_like(tensor)

    class Elsewhere:
        leaf = stray

    step = anybatch.apply(list(batch), ub_size=4)(lambda x, y: function(x * Elsewhere.leaf, y))
    tensors = {**batch, "stray": stray}
    _assert_no_trace(network, tensors, lambda: anybatch.verify(step, **batch))


def test_arguments_are_put_back() -> None:
    """Tensors, arrays and containers that the function changes in place are as before."""
    model = nn.Linear(6, 3).double()
    array, past, table = np.arange(10) % 3, [1], {"seen": {2}}

    @anybatch.apply(["x", "y"], ub_size=4, on_inexact="ignore")
    def step(x: Tensor, y: Any, past: list[int], table: dict[str, set[int]]) -> Tensor:
        x.zero_()
        target = torch.from_numpy(y.copy())
        y[:] = 0
        past.clear()
        table["seen"].add(3)
        table["other"] = set()
        return F.cross_entropy(model(x), target)

    x = torch.randn(10, 6, dtype=torch.float64)
    values = x.clone()
    anybatch.verify(step, x, array, past, table)
    assert torch.equal(x, values)
    assert array.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert past == [1]
    assert table == {"seen": {2}}


def test_next_call_warns_and_probes_as_if_nothing_had_been() -> None:
    """What a decorated function has learnt and warned of is its own: `verify` changes nothing of it."""

    class Calls:
        count = 0

    def calls_and_warnings(verifies: bool) -> list[tuple[int, int]]:
        torch.manual_seed(1)
        function, _ = function_with(["BatchNorm"])
        batch = mini_batch()

        def counting(x: Tensor, y: Tensor) -> Tensor:
            Calls.count += 1
            return function(x, y)

        step = anybatch.apply(list(batch), ub_size=4)(counting)
        seen = []
        for _ in range(3):
            if verifies:
                anybatch.verify(step, **batch)
            Calls.count = 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(**batch)
            seen.append((Calls.count, sum(one.category is InexactWarning for one in caught)))
        return seen

    alone = calls_and_warnings(verifies=False)
    assert alone[0][1] > 0
    assert alone[0][0] > alone[1][0]
    assert calls_and_warnings(verifies=True) == alone


def test_warnings_of_the_function_pass() -> None:
    """A warning that the user's function gives reaches the caller."""
    function, _ = function_with([])
    batch = mini_batch()

    def warning(x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 5:
            warnings.warn("mine", stacklevel=1)
        return function(x, y)

    with pytest.warns(UserWarning, match="mine"):
        anybatch.verify(anybatch.apply(list(batch), ub_size=4)(warning), **batch)
