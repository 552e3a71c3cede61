"""A call that ends with an exception leaves everything as it was, bit for bit (Rule 3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.batch import register
from anybatch.errors import BatchError, InexactError, InexactWarning, LossError, WeightError

ROWS, UB_SIZE, PIECES = 24, 6, 4
IGNORED = -100


class Boom(Exception):
    """The user's own."""


class Raising(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


def _raise(error: BaseException) -> Any:
    raise error


class Net(nn.Module):
    """Changes all that a call may change: statistics, buffers in place and replaced, modes, random states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.second, self.unused = nn.Linear(4, 2), nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.double()
        self.runs = 0
        self.on_run: dict[int, Callable[[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.steps += 1
        self.last = self.last + 1
        self.first.eval()
        random.random()
        np.random.rand()
        outputs = self.second(self.drop(self.norm(self.first(x))))
        return self.on_run[self.runs](outputs) if self.runs in self.on_run else outputs


@dataclass(frozen=True)
class State:
    """Everything that a call may not leave changed: values, and which tensors hold them."""

    tensors: list[Tensor | None]
    values: list[Tensor | None]
    modes: list[bool]
    torch_random: Tensor
    numpy_random: Any
    python_random: Any

    @classmethod
    def of(cls, *modules: nn.Module) -> State:
        parts = [part for module in modules for part in module.modules()]
        tensors: list[Tensor | None] = []
        for module in modules:
            for parameter in module.parameters():
                tensors += [parameter.detach(), parameter.grad]
            tensors += module.buffers()
        return cls(
            tensors,
            [None if tensor is None else tensor.to_dense().clone() for tensor in tensors],
            [part.training for part in parts],
            torch.get_rng_state(),
            np.random.get_state(),
            random.getstate(),
        )

    def assert_same(self, other: State) -> None:
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            is_same = mine is theirs or (
                mine is not None and theirs is not None and _shares_memory(mine, theirs)
            )
            assert is_same, "another tensor is in its place"
        for mine, theirs in zip(self.values, other.values, strict=True):
            assert mine is theirs or torch.equal(mine, theirs), "a value has changed"
        assert self.modes == other.modes
        assert torch.equal(self.torch_random, other.torch_random)
        assert all(np.array_equal(a, b) for a, b in zip(self.numpy_random, other.numpy_random, strict=True))
        assert self.python_random == other.python_random


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """`detach` gives another object for the same parameter each time."""
    return one.layout == torch.strided and one.data_ptr() == other.data_ptr()


@pytest.fixture(params=["no gradients", "gradients"])
def net(request: pytest.FixtureRequest) -> Net:
    """A network, with or without gradients from earlier."""
    net = Net()
    if request.param == "gradients":
        for parameter in [*net.first.parameters(), *net.unused.parameters()]:
            parameter.grad = torch.randn_like(parameter)
    return net


@pytest.fixture(autouse=True)
def quiet_batch_norm() -> Iterator[None]:
    """That BatchNorm takes its statistics over pieces is known here."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=InexactWarning)
        yield


def _batch() -> dict[str, Tensor]:
    torch.manual_seed(7)
    labels = torch.arange(ROWS) % 2
    labels[torch.arange(ROWS) % 4 == 1] = IGNORED
    return {"x": torch.randn(ROWS, 3, dtype=torch.float64), "y": labels}


def _apply(net: Net, **options: Any) -> Callable[..., Any]:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    return anybatch.apply(["x", "y"], ub_size=UB_SIZE, **options)(function)


def assert_undone(call: Callable[..., Any], error: type[BaseException], *modules: nn.Module) -> None:
    """The call raises the error, and everything is as before."""
    rows = _batch()
    before = State.of(*modules)
    with pytest.raises(error):
        call(**rows)
    before.assert_same(State.of(*modules))


FIRST_CALL_RUNS = 24
"""More than the first call makes, probe and pieces together."""


@pytest.mark.parametrize("error", [Boom, RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", range(1, PIECES + 1))
def test_exception_in_forward(net: Net, place: int, error: type[BaseException]) -> None:
    """An exception in the forward of any piece."""
    call = _apply(net)
    call(**_batch())
    net.zero_grad()
    net.on_run = {net.runs + place: lambda outputs: _raise(error("in forward"))}
    assert_undone(call, error, net)


@pytest.mark.parametrize("run", range(1, FIRST_CALL_RUNS))
def test_exception_in_any_run_of_the_first_call(net: Net, run: int) -> None:
    """An exception in the probe, or in the first call's pieces; the probe's trials can't be told from it."""
    net.on_run = {run: lambda outputs: _raise(KeyboardInterrupt)}
    rows, call = _batch(), _apply(net)
    before = State.of(net)
    try:
        call(**rows)
    except KeyboardInterrupt:
        before.assert_same(State.of(net))
    else:
        assert net.runs < run


@pytest.mark.parametrize("error", [Boom, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", range(1, PIECES + 1))
@pytest.mark.parametrize("kind", ["function", "hook"])
def test_exception_in_backward(net: Net, place: int, kind: str, error: type[BaseException]) -> None:
    """An exception in the backward of any piece, in a custom Function or in a tensor hook."""

    def fail(outputs: Tensor) -> Tensor:
        if kind == "function":
            return Raising.apply(outputs, error("in backward"))
        outputs.register_hook(lambda gradient: _raise(error("in backward")))
        return outputs

    call = _apply(net, on_inexact="ignore")
    net.on_run = {place: fail}
    assert_undone(call, error, net)


class Table:
    """A container of the user's own, which can't be cut everywhere."""

    def __init__(self, x: Tensor, is_broken: bool = False) -> None:
        self.x, self.is_broken = x, is_broken


def _rebuild(table: Table, children: list[Any]) -> Table:
    if table.is_broken and len(children[0]) == UB_SIZE and float(children[0][0, 0]) == 2 * UB_SIZE:
        raise Boom
    return Table(children[0])


register(Table, lambda table: [("x", table.x)], _rebuild)


def test_exception_between_pieces(net: Net) -> None:
    """An exception while the third piece is cut, after two have run."""
    x = torch.arange(ROWS, dtype=torch.float64)[:, None].expand(ROWS, 3).contiguous()

    def function(table: Table, y: Tensor) -> Tensor:
        return F.cross_entropy(net(table.x), y)

    call = anybatch.apply(["table", "y"], ub_size=UB_SIZE)(function)
    labels = _batch()["y"]
    call(table=Table(x), y=labels)
    runs = net.runs
    assert_undone(lambda **_: call(table=Table(x, is_broken=True), y=labels), Boom, net)
    assert net.runs == runs + 2


def test_exception_in_a_weight(net: Net) -> None:
    """An exception in the function that weighs pieces, and a weight that is none: nothing has run."""
    call = _apply(net, weight=lambda y: _raise(Boom()))
    assert_undone(call, Boom, net)
    assert net.runs == 0
    assert_undone(_apply(net, weight=lambda y: y.double().mean()), WeightError, net)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_exception_in_a_parameters_hook(net: Net, kind: str, error: type[BaseException]) -> None:
    """An exception in a hook on a parameter, which runs when all pieces are done."""
    getattr(net.first.weight, kind)(lambda _: _raise(error()))
    assert_undone(_apply(net), error, net)


def test_exception_above_the_call(net: Net) -> None:
    """An exception in the graph above an entry that requires grad."""
    encoder, rows = nn.Linear(3, 3).double(), _batch()
    x = encoder(rows["x"])
    x.register_hook(lambda gradient: _raise(Boom()))
    call = _apply(net)
    assert_undone(lambda **_: call(x=x, y=rows["y"]), Boom, net, encoder)


@pytest.mark.parametrize("is_later_call", [False, True])
def test_exception_in_evaluation(net: Net, is_later_call: bool) -> None:
    """An exception with gradients disabled."""
    call = _apply(net)
    with torch.no_grad():
        if is_later_call:
            call(**_batch())
        net.on_run = {net.runs + 3: lambda outputs: _raise(KeyboardInterrupt)}
        assert_undone(call, KeyboardInterrupt, net)


@pytest.mark.parametrize("place", [1, 3, 4, 6, 8])
def test_exception_while_counting(net: Net, place: int) -> None:
    """An exception in the counting pass of a loss with two denominators, or in the pieces after it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        outputs = net(x)
        return F.cross_entropy(outputs, y) + 0.1 * outputs.square().mean()

    call = anybatch.apply(["x", "y"], ub_size=UB_SIZE)(function)
    call(**_batch())
    before = net.runs
    call(**_batch())
    assert net.runs - before == 2 * PIECES
    net.on_run = {net.runs + place: lambda outputs: _raise(Boom())}
    assert_undone(call, Boom, net)


def test_refused_loss(net: Net) -> None:
    """A loss that is refused."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        outputs = net(x)
        return (outputs - outputs.mean(0)).square().mean()

    assert_undone(anybatch.apply(["x", "y"], ub_size=UB_SIZE)(function), InexactError, net)


@pytest.mark.parametrize("ub_size", [UB_SIZE, ROWS])
@pytest.mark.parametrize("returned", [None, 1.0, torch.ones(3), "detached", "rows"])
def test_what_is_no_loss(net: Net, returned: Any, ub_size: int) -> None:
    """A function that returns no loss."""

    def function(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(net(x), y, reduction="none" if returned == "rows" else "mean")
        return loss.detach() if returned == "detached" else loss if returned == "rows" else returned

    assert_undone(anybatch.apply(["x", "y"], ub_size=ub_size)(function), LossError, net)


def test_mini_batch_that_can_not_be_cut(net: Net) -> None:
    """Arguments that disagree on the number of rows."""
    rows = _batch()
    call = _apply(net)
    assert_undone(lambda **_: call(x=rows["x"], y=rows["y"][:-1]), BatchError, net)
    assert net.runs == 0


def test_warning_that_is_an_error(net: Net) -> None:
    """A warning that the caller turns into an error comes before anything is committed."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_undone(_apply(net), InexactWarning, net)


def test_module_that_runs_for_the_first_time_where_it_fails(net: Net) -> None:
    """A module out of reach of the function, which only the last piece runs, is put back too."""
    hidden = [Net()]
    holder = type("Holder", (), {"net": hidden[0]})()
    x = torch.arange(ROWS, dtype=torch.float64)[:, None].expand(ROWS, 3).contiguous()

    def function(x: Tensor, y: Tensor) -> Tensor:
        outputs = net(x)
        if float(x[0, 0]) == ROWS - UB_SIZE:
            outputs = outputs + holder.net(x)
            raise Boom
        return F.cross_entropy(outputs, y)

    call = anybatch.apply(["x", "y"], ub_size=UB_SIZE, on_inexact="ignore")(function)
    assert_undone(lambda **_: call(x=x, y=_batch()["y"]), Boom, net, hidden[0])
    assert hidden[0].runs == 1


@pytest.mark.parametrize("ub_size", [UB_SIZE, ROWS])
def test_call_after_a_failure_is_as_if_there_had_been_none(ub_size: int) -> None:
    """After a failed call the next gives the same loss, gradients, statistics and hook calls, bit for bit."""
    results = []
    for fails in (False, True):
        net, calls = Net(), []
        net.first.weight.register_hook(calls.append)
        net.first.weight.register_post_accumulate_grad_hook(calls.append)

        def function(x: Tensor, y: Tensor, net: Net = net) -> Tensor:
            return F.cross_entropy(net(x), y)

        call, rows = anybatch.apply(["x", "y"], ub_size=ub_size)(function), _batch()
        call(**rows)
        net.zero_grad()
        calls.clear()
        if fails:
            net.on_run = {net.runs + 1: lambda outputs: _raise(Boom())}
            with pytest.raises(Boom):
                call(**rows)
            assert calls == []
        loss = call(**rows)
        results.append((loss, State.of(net), len(calls)))
    (loss, expected, calls_expected), (other, got, calls_got) = results
    assert torch.equal(loss, other)
    assert calls_expected == calls_got == 2
    for one, two in zip(expected.values, got.values, strict=True):
        assert one is two or torch.equal(one, two)
    assert torch.equal(expected.torch_random, got.torch_random)


def test_first_call_leaves_the_statistics_of_its_pieces_only() -> None:
    """The probe leaves no trace: a first call changes what a later call from the same state changes."""
    states = []
    for is_first in (True, False):
        net, rows = Net(), _batch()
        call = _apply(net)
        if not is_first:
            saved = {name: buffer.clone() for name, buffer in net.named_buffers()}
            modes, random_state = [part.training for part in net.modules()], torch.get_rng_state()
            call(**rows)
            net.load_state_dict(saved, strict=False)
            for part, mode in zip(net.modules(), modes, strict=True):
                part.training = mode
            torch.set_rng_state(random_state)
            net.zero_grad()
        call(**rows)
        states.append(State.of(net))
    for one, two in zip(states[0].values, states[1].values, strict=True):
        assert one is two or torch.equal(one, two)
    assert torch.equal(states[0].torch_random, states[1].torch_random)
    assert states[0].modes == states[1].modes
