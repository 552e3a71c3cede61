"""Ways to accumulate, and the measure of their error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.cli.demo.ways import (
    gradient_error,
    gradients_of,
    installed_ways,
    loss_of,
    with_anybatch,
    with_loop,
)


def linear_case() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A linear model, ten rows and their labels, some ignored, in float64."""
    model = nn.Linear(3, 4).double()
    label = torch.tensor([0, 1, -100, 3, -100, -100, 2, 0, -100, 1])
    return model, torch.rand(10, 3, dtype=torch.float64), label


def test_gradient_error_is_relative_to_the_largest_gradient() -> None:
    """The largest difference of any entry, 0.5, over the largest expected entry, 4."""
    expected = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    got = [torch.tensor([1.25, -4.0]), torch.tensor([1.5])]
    assert gradient_error(got, expected) == 0.5 / 4
    assert gradient_error(expected, expected) == 0


def test_gradients_of_leaves_none_behind() -> None:
    """Gradients are copied out, a parameter without one counts zeros, and none stays."""
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    gradients = gradients_of(model, lambda: model[0](torch.ones(1, 2)).sum().backward())
    assert [each.tolist() for each in gradients] == [[[1.0, 1.0]], [1.0], [[0.0, 0.0]], [0.0]]
    assert all(each.grad is None for each in model.parameters())


def test_loop_divides_each_loss_by_the_number_of_pieces() -> None:
    """The usual loop is what it is known as: the mean of the pieces' means, whatever their rows."""
    model, x, label = linear_case()
    gradients = gradients_of(model, lambda: with_loop(model, x, label, 4))
    means = [F.cross_entropy(model(x[i : i + 4]), label[i : i + 4]) for i in (0, 4, 8)]
    expected = torch.autograd.grad(sum(means) / 3, list(model.parameters()))
    assert gradient_error(gradients, expected) < 1e-14


def test_anybatch_is_exact_where_the_loop_is_not() -> None:
    """On an uneven cut with ignored labels the library gives the whole's gradients; the loop is far off."""
    model, x, label = linear_case()
    whole = gradients_of(model, lambda: loss_of(model, x, label).backward())
    ours = gradients_of(model, lambda: with_anybatch(model, x, label, 4))
    loop = gradients_of(model, lambda: with_loop(model, x, label, 4))
    assert gradient_error(ours, whole) < 1e-12
    assert gradient_error(loop, whole) > 0.05


def test_installed_ways_without_mbp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mbp-pytorch is not installed it is left out, and said to be."""
    monkeypatch.setattr("anybatch.cli.demo.ways.find_spec", lambda name: None)
    ways, missing = installed_ways()
    assert list(ways) == ["loop: loss / pieces", "anybatch"]
    assert missing == {"mbp-pytorch": "not installed"}


def test_installed_ways_with_mbp() -> None:
    """Where mbp-pytorch is installed it is tried, under its version."""
    ways, missing = installed_ways()
    assert list(ways) == ["loop: loss / pieces", "mbp-pytorch 0.2.6", "anybatch"]
    assert missing == {}
