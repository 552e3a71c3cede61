"""Graphs of `nn.DataParallel`: as many branches as devices got rows, and how they are told to be alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anybatch.exact import graph
from anybatch.exact.labels import Label, label
from anybatch.exact.replicas import without_replicas


class Gather(torch.autograd.Function):
    """Named like torch's own, which works on accelerators only."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]  # type: ignore[attr-defined]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.split(ctx.sizes)  # type: ignore[attr-defined]


def _read(rows: int, devices: int) -> tuple[Tensor, graph.Graph]:
    """The loss of some rows that were shared out, with a weight decay, and its graph."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    chunks = torch.ones(rows, 3, dtype=torch.float64).chunk(devices)
    loss = Gather.apply(*((chunk * weight).tanh() for chunk in chunks)).square().mean() + weight.pow(2).sum()
    return loss, graph.read([loss])


def test_what_lies_below_the_gathered_outputs_is_left_out() -> None:
    """The replicas go; what is above them, and beside, stays in its order of children before parents."""
    _, seen = _read(6, 3)
    found = without_replicas(seen)
    assert "TanhBackward0" in seen.names
    assert [name.rstrip("0123456789") for name in found.names] == [
        "torch::autograd::AccumulateGrad",  # of the weight decay, too
        "GatherBackward",
        "PowBackward",
        "MeanBackward",
        "PowBackward",
        "SumBackward",
        "AddBackward",
    ]
    assert found.names[found.roots[0]] == "AddBackward0"
    assert [[found.names[child] for child in below] for below in found.edges][-1] == [
        "MeanBackward0",
        "SumBackward0",
    ]


def test_graph_without_replicas_stays_as_it_is() -> None:
    """A graph in which nothing was gathered is the same after."""
    weight = torch.ones(3, requires_grad=True)
    loss = (torch.ones(4, 3) * weight).tanh().mean()
    seen = graph.read([loss])
    assert without_replicas(seen).is_like(seen)


@pytest.mark.parametrize(("large", "small"), [((6, 3), (4, 2)), ((6, 3), (1, 1)), ((5, 2), (4, 2))])
def test_other_numbers_of_devices_are_labelled(large: tuple[int, int], small: tuple[int, int]) -> None:
    """Rows are found above the gathered outputs, whatever the number of devices that had some."""
    (_large_loss, large_graph), (_small_loss, small_graph) = _read(*large), _read(*small)
    found = label(large_graph, large[0], small_graph, small[0])
    assert found is not None
    labels = dict(zip(found.graph.names, found.labels, strict=True))
    assert labels["GatherBackward"] is Label.ROWS
    assert labels["MeanBackward0"] is Label.COLLAPSED
    assert labels["SumBackward0"] is Label.PARAMETERS
    assert found.couplings == ()
