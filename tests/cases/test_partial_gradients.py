"""What a failed attempt had accumulated is taken back, what was there before stays.

facebookresearch/metaseq#314, OpenNMT/OpenNMT-py#2550, espnet/espnet#3283.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.fit.auto import Auto

from .whole import gradient_error, gradients


class Net(nn.Module):
    """Two layers; the second has its gradient already when the failure in backward comes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 1)
        self.fails_in, self.largest, self.runs = "nothing", 8, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        inner = self.first(x).tanh()
        if len(x) > self.largest and self.runs > 1:
            if self.fails_in == "forward":
                self._fail()
            if inner.requires_grad and self.fails_in == "backward":
                inner.register_hook(self._fail)
        return self.second(inner)

    def _fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")


def step(net: Net, earlier: bool) -> tuple[list[Tensor | None], list[Tensor | None], dict[str, Tensor]]:
    """The gradients before the call and those expected after it, and the mini-batch."""
    x0, y0, x, y = torch.randn(4, 5), torch.randn(4, 1), torch.randn(8, 5), torch.randn(8, 1)
    if earlier:
        F.mse_loss(net(x0), y0).backward()
    before = gradients(net.parameters())
    whole = torch.autograd.grad(F.mse_loss(net(x), y), net.parameters())
    after = [one if old is None else old + one for old, one in zip(before, whole, strict=True)]
    net.runs = 0
    return before, after, {"x": x, "y": y}


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_partial_gradients_are_taken_back(fails_in: str, earlier: bool) -> None:
    """After recovery gradients are those of the earlier batch, if there was one, plus this one."""
    net = Net()
    _, expected, rows = step(net, earlier)
    net.fails_in, net.largest = fails_in, 3
    tensors = [parameter.grad for parameter in net.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anybatch.errors.InexactWarning)
        anybatch.apply(["x", "y"], ub_size=Auto(largest=4, prefer="largest"))(
            lambda x, y: F.mse_loss(net(x), y)
        )(**rows)
    assert gradient_error(expected, gradients(net.parameters())) <= 1e-10
    assert all(old is None or p.grad is old for p, old in zip(net.parameters(), tensors, strict=True))


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("ub_size", [4, 8])
def test_gradients_are_as_before_a_final_failure(fails_in: str, earlier: bool, ub_size: int) -> None:
    """With a size of the caller's the error comes through; None stays None, and the rest its value."""
    net = Net()
    before, _, rows = step(net, earlier)
    net.fails_in, net.largest, net.runs = fails_in, 3, 1
    call = anybatch.apply(["x", "y"], ub_size=ub_size)(lambda x, y: F.mse_loss(net(x), y))
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        call(**rows)
    assert gradient_error(before, gradients(net.parameters())) == 0.0
