"""How far apart two runs are, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from anybatch._verify.comparison import difference, limit
from anybatch._verify.runs import Outcome

NAN = math.nan


def _run(
    loss: float = 1.0,
    strays: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    **gradients: list[float] | None,
) -> Outcome:
    named = {name: None if value is None else torch.tensor(value) for name, value in gradients.items()}
    return Outcome({None: loss}, named, strays or {})


def test_difference_is_relative_to_the_largest_gradient() -> None:
    """The largest difference is divided by the largest gradient of the whole, wherever that is."""
    found = difference(_run(a=[1.0, -8.0], b=[2.0]), _run(a=[1.0, -8.0], b=[2.5]))
    assert found.gradient_ratio == 0.5 / 8
    assert found.parameter == "b"
    assert found.ratio == found.gradient_ratio


def test_equal_runs_do_not_differ() -> None:
    """Equal gradients, None and nan on both sides, and empty ones are no difference."""
    run = {"a": [1.0, NAN], "b": None, "c": []}
    found = difference(_run(NAN, **run), _run(NAN, **run))
    assert (found.gradient_ratio, found.parameter, found.loss_ratio) == (0.0, None, 0.0)


@pytest.mark.parametrize("other", [None, [1.0, NAN], [1.0, math.inf]])
def test_gradient_on_one_side_only(other: list[float] | None) -> None:
    """A gradient that one of the two lacks, or that only one has finite, differs infinitely."""
    for left, right in ((other, [1.0, 2.0]), ([1.0, 2.0], other)):
        found = difference(_run(a=left, b=[1.0]), _run(a=right, b=[1.0]))
        assert found.gradient_ratio == math.inf
        assert found.parameter == "a"


def test_parameter_that_one_run_does_not_know() -> None:
    """A parameter that is missing in one run had no gradient there."""
    assert difference(_run(a=[1.0]), _run(a=[1.0], b=[0.0])).parameter == "b"
    assert difference(_run(a=[1.0]), _run(a=[1.0], b=None)).parameter is None


def test_gradients_that_are_zero() -> None:
    """With a gradient of zero any difference is infinitely large, and none is none."""
    assert difference(_run(a=[0.0]), _run(a=[0.0])).gradient_ratio == 0
    assert difference(_run(a=[0.0]), _run(a=[1e-9])).gradient_ratio == math.inf


def test_differences_beyond_float32() -> None:
    """Gradients are compared in float64, and complex ones by their distance."""
    wide = Outcome({None: 1.0}, {"a": torch.tensor([3 + 4j])}, {})
    other = Outcome({None: 1.0}, {"a": torch.tensor([3 + 3j])}, {})
    assert difference(wide, other).gradient_ratio == pytest.approx(1 / 5)


def test_sparse_gradients() -> None:
    """A sparse gradient equals the dense one of the same values."""
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    sparse = Outcome({None: 1.0}, {"a": dense.to_sparse()}, {})
    assert difference(Outcome({None: 1.0}, {"a": dense}, {}), sparse).gradient_ratio == 0
    assert difference(sparse, Outcome({None: 1.0}, {"a": dense + 1}, {})).gradient_ratio == 0.5


def test_loss_is_relative_to_itself_or_to_the_largest_gradient() -> None:
    """A loss near zero is measured by the gradient, as rounding is."""
    assert difference(_run(4.0, a=[2.0]), _run(5.0, a=[2.0])).loss_ratio == 1 / 4
    assert difference(_run(0.0, a=[2.0]), _run(1.0, a=[2.0])).loss_ratio == 1 / 2
    assert difference(_run(1.0, a=[2.0]), _run(NAN, a=[2.0])).loss_ratio == math.inf
    assert difference(_run(math.inf, a=[2.0]), _run(math.inf, a=[2.0])).loss_ratio == 0


def test_tensors_without_a_name() -> None:
    """A leaf without a name is compared where both runs know it: one of them alone made the others."""
    leaf, made = torch.zeros(2), torch.zeros(3)
    whole = _run(a=[1.0], strays={id(leaf): (leaf, torch.tensor([4.0, 0.0])), id(made): (made, made)})
    pieces = _run(a=[1.0], strays={id(leaf): (leaf, torch.tensor([4.0, 1.0]))})
    found = difference(whole, pieces)
    assert found.gradient_ratio == 1 / 4
    assert found.parameter == "a tensor of shape (2,)"


EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("lowest", "own", "expected"),
    [
        (torch.float64, [None], 1e-10),
        (torch.float64, [1e-3], 1e-10),
        (torch.complex128, [None], 1e-10),
        (torch.float32, [0.0], 2 * EPS),
        (torch.float32, [5 * EPS], 10 * EPS),
        (torch.float32, [0.0, 5 * EPS, 3 * EPS], 10 * EPS),
        (torch.float32, [5 * EPS, None, 1001 * EPS], 10 * EPS),
        (torch.float32, [1000 * EPS], 2000 * EPS),
        (torch.float32, [1001 * EPS], 64 * EPS),
        (torch.float32, [None], 64 * EPS),
        (torch.bfloat16, [0.01], 0.02),
        (torch.bfloat16, [None], 0.05),
    ],
)
def test_limit(lowest: torch.dtype, own: list[float | None], expected: float) -> None:
    """Twice the own error, two roundings at least; 64 roundings or 5 % where it is unknown or no rounding."""
    assert limit(lowest, own).ratio == expected
