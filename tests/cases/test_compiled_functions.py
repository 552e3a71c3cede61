"""`torch.compile`: functions, modules and methods compiled, exact, and in as few graphs as the cut allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import anybatch

from .whole import clear, gradient_error, gradients, whole

Step = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "counted": lambda z, label: F.cross_entropy(z, label),
    "sum": lambda z, label: F.cross_entropy(z, label, reduction="sum"),
    "two denominators": lambda z, label: F.cross_entropy(z, label) + 0.3 * z.square().mean(),
}


def _function(net: nn.Module, loss: Any, backend: Any) -> Step:
    compiled: Step = torch.compile(lambda x, label: loss(net(x), label), backend=backend)
    return compiled


def _module(net: nn.Module, loss: Any, backend: Any) -> Step:
    compiled = torch.compile(net, backend=backend)
    return lambda x, label: loss(compiled(x), label)


def _method(net: nn.Module, loss: Any, backend: Any) -> Step:
    net.compile(backend=backend)
    return lambda x, label: loss(net(x), label)


def _layer(net: nn.Module, loss: Any, backend: Any) -> Step:
    compiled = torch.compile(net.first, backend=backend)  # type: ignore[arg-type]
    return lambda x, label: loss(net.second(compiled(x).tanh()), label)  # type: ignore[operator]


WAYS = {"function": _function, "module": _module, "method": _method, "layer": _layer}


def _batch(rows: int) -> dict[str, Tensor]:
    label = torch.randint(4, (rows,))
    label[1::3] = -100
    return {"x": torch.randn(rows, 3), "label": label}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_compiled_step_is_exact_in_at_most_two_graphs(way: str, loss: str, backend: str) -> None:
    """The gradient is that of the whole, and an uneven cut builds two graphs, once (litgpt#794)."""
    net = _Net()
    plain = _Net()
    plain.load_state_dict(net.state_dict())
    counter = CompileCounterWithBackend(backend)
    call = anybatch.apply(["x", "label"], 8)(WAYS[way](net, LOSSES[loss], counter))
    for _ in range(3):
        batch = _batch(29)  # pieces of 8, 7, 7 and 7
        expected_loss, expected = whole(
            lambda x, label: LOSSES[loss](plain(x), label), batch, plain.parameters()
        )
        clear(net.parameters())
        found = call(**batch)
        torch.testing.assert_close(found, expected_loss, rtol=1e-10, atol=1e-10)
        assert gradient_error(expected, gradients(net.parameters())) <= 1e-10
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize(("rows", "ub_size"), [(10, 4), (9, 1), (12, 3)])
def test_compiled_step_at_other_cuts(rows: int, ub_size: int) -> None:
    """The same at other uneven cuts and at single rows."""
    net, batch = _Net(), _batch(rows)
    _, expected = whole(lambda x, label: F.cross_entropy(net(x), label), batch, net.parameters())
    counter = CompileCounterWithBackend("aot_eager")
    call = anybatch.apply(["x", "label"], ub_size)(_function(net, F.cross_entropy, counter))
    call(**batch)
    assert gradient_error(expected, gradients(net.parameters())) <= 1e-10
    assert 1 <= counter.frame_count <= 2


def test_dict_of_compiled_losses_is_exact_and_compiled() -> None:
    """Losses with different denominators stay compiled where they come as a dict."""
    net, batch = _Net(), _batch(29)
    counter = CompileCounterWithBackend("aot_eager")

    def losses(x: Tensor, label: Tensor) -> dict[str, Tensor]:
        output = net(x)
        return {"class": F.cross_entropy(output, label), "size": output.square().mean()}

    expected_loss, expected = whole(
        lambda x, label: sum(losses(x, label).values(), torch.zeros(())), batch, net.parameters()
    )
    call = anybatch.apply(["x", "label"], 8)(torch.compile(losses, backend=counter))
    for _ in range(2):
        clear(net.parameters())
        found = call(**batch)
        assert gradient_error(expected, gradients(net.parameters())) <= 1e-10
        torch.testing.assert_close(sum(found.values()), expected_loss, rtol=1e-10, atol=1e-10)
    assert 1 <= counter.frame_count <= 2


def test_compiled_step_evaluates() -> None:
    """With gradients disabled the compiled function gives the loss and outputs of the whole."""
    net, batch = _Net(), _batch(29)
    compiled = torch.compile(lambda x, label: (F.cross_entropy(net(x), label), net(x)), backend="aot_eager")
    call = anybatch.apply(["x", "label"], 8)(compiled)
    with torch.no_grad():
        loss, output = call(**batch)
        torch.testing.assert_close(loss, F.cross_entropy(net(batch["x"]), batch["label"]))
        torch.testing.assert_close(output, net(batch["x"]))


def test_compiled_module_gives_no_warning_and_leaves_the_filters() -> None:
    """torch's warning of global hooks is no concern of the caller, whose own warnings come once, as ever."""
    net, batch = torch.compile(_Net(), backend="eager"), _batch(10)

    def step(x: Tensor, label: Tensor) -> Tensor:
        warnings.warn("of the caller's own", UserWarning, stacklevel=1)
        return F.cross_entropy(net(x), label)

    call = anybatch.apply(["x", "label"], 4)(step)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        before = list(warnings.filters)
        for _ in range(3):
            call(**batch)
        assert list(warnings.filters) == before
    assert [str(one.message) for one in said] == ["of the caller's own"]
