"""A compiled function meets at most two sizes, so at most two graphs are built (Lightning-AI/litgpt#794)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _counting() -> tuple[list[int], Callable[..., Any]]:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return module.forward

    return graphs, backend


def _train(rows: list[int], ub_size: int) -> tuple[int, float]:
    graphs, backend = _counting()
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    compiled = torch.compile(lambda x: net(x).square().mean(), backend=backend)
    call = anybatch.apply(["x"], ub_size=ub_size)(compiled)
    worst = 0.0
    for n in rows:
        x = torch.randn(n, 4)
        net.zero_grad()
        net(x).square().mean().backward()
        expected = net.weight.grad.clone()
        net.zero_grad()
        call(x=x)
        worst = max(worst, float((net.weight.grad - expected).abs().max() / expected.abs().max()))
    return len(graphs), worst


@pytest.mark.parametrize(("rows", "ub_size"), [([16, 16, 16], 8), ([64, 64], 16), ([8, 8], 8)])
def test_even_cut_builds_one_graph(rows: list[int], ub_size: int) -> None:
    """Pieces of one size are compiled once; the look at the loss before compiles nothing."""
    graphs, error = _train(rows, ub_size)
    assert graphs == 1
    assert error <= 1e-10


@pytest.mark.parametrize(
    ("rows", "ub_size"), [([29, 29, 29], 8), ([17, 17], 8), ([9, 9], 4), ([31, 29, 27, 22], 8)]
)
def test_ragged_cut_builds_at_most_two_graphs(rows: list[int], ub_size: int) -> None:
    """A ragged cut has at most two sizes, and further sizes fit the graph of the second."""
    graphs, error = _train(rows, ub_size)
    assert graphs <= 2
    assert error <= 1e-10


@pytest.mark.parametrize(("rows", "ub_size"), [(29, 8), (17, 8), (9, 4), (25, 8), (33, 2), (3, 2), (101, 10)])
def test_cut_has_at_most_two_sizes_and_no_single_row(rows: int, ub_size: int) -> None:
    """The pieces differ by at most one row, and none has one row where the limit allows."""
    weight = nn.Parameter(torch.ones(()))
    sizes: list[int] = []

    def step(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return (weight * x).mean()

    anybatch.apply(["x"], ub_size=ub_size, on_inexact="ignore")(step)(x=torch.randn(rows))
    assert sum(sizes) == rows
    assert len(set(sizes)) <= 2
    assert max(sizes) <= ub_size
    if ub_size > 2 or rows % 2 == 0:
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 1


def test_cut_of_29_rows_at_8_is_known() -> None:
    """29 rows by 8 are 8, 7, 7, 7 and not 8, 8, 8, 5."""
    weight = nn.Parameter(torch.ones(()))
    sizes: list[int] = []

    def step(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return (weight * x).mean()

    anybatch.apply(["x"], ub_size=8, on_inexact="ignore")(step)(x=torch.randn(29))
    assert sizes == [8, 7, 7, 7]
