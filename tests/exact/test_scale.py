"""Backward with each term scaled: where factors go in, and that a call's gradients are those of the whole."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.exact import graph, scale
from anybatch.exact.labels import label
from anybatch.exact.law import Law, TermLaw
from anybatch.exact.pattern import Pattern
from anybatch.exact.scale import CannotScale, Plan
from anybatch.exact.terms import find

MEAN, ONCE, FOLLOWING = TermLaw(Law.MEAN), TermLaw(Law.ONCE), TermLaw(Law.MEAN, follows_rows=True)


class _Problem:
    """One weight and one learned scale, rows 1, 2, 3, ..., and a loss of both."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], laws: Sequence[TermLaw]) -> None:
        self.weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        self.scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        rows = torch.arange(1, 5, dtype=torch.float64)
        self.loss, fewer = (loss(self.weight * rows[:count], self.scale) for count in (4, 3))
        labelled = label(graph.read([self.loss]), 4, graph.read([fewer]), 3)
        assert labelled is not None
        terms = tuple(find(labelled, [0]).terms)
        laws_by_key = {term.key: law for term, law in zip(terms, laws, strict=True)}
        self.pattern = Pattern(terms, laws_by_key, (None,))

    def plan(self, *factors: float, pieces: int = 4, is_final: bool = True) -> Plan:
        readings = self.pattern.read([self.loss])
        (planned,) = scale.plans(self.pattern, readings, factors, pieces, is_final=is_final)
        return planned

    def gradients(self, *factors: float, pieces: int = 4, is_final: bool = True) -> tuple[float, float]:
        """The gradients of weight and scale after a backward as planned."""
        planned = self.plan(*factors, pieces=pieces, is_final=is_final)
        scale.install([planned])
        torch.autograd.backward(scale.seeded([self.loss], [planned]))
        return tuple(0.0 if leaf.grad is None else leaf.grad.item() for leaf in (self.weight, self.scale))


def test_one_factor_is_the_seed() -> None:
    """Where all terms have one factor backward starts with it, and no node is hooked."""
    problem = _Problem(lambda z, _: z.mean() + z.exp().mean(), [MEAN, MEAN])
    assert problem.plan(0.25, 0.25) == Plan(0.25, (), 0.25)


def test_two_factors_scale_each_term_by_its_own() -> None:
    """The mean of the rows is 2.5 and their sum 10, scaled by a half and by a fifth."""
    problem = _Problem(lambda z, _: z.mean() + z.sum(), [MEAN, MEAN])
    assert problem.plan(0.5, 0.2).common is None
    weight, _ = problem.gradients(0.5, 0.2)
    assert weight == pytest.approx(0.5 * 2.5 + 0.2 * 10, rel=1e-15)


def test_learned_coefficient_gets_the_factor_of_its_term() -> None:
    """In `s * mean + sum` the coefficient's gradient is the mean, scaled like the mean."""
    problem = _Problem(lambda z, s: s * z.mean() + z.sum(), [MEAN, MEAN])
    weight, learned = problem.gradients(0.5, 0.2)
    assert weight == pytest.approx(0.5 * 3 * 2.5 + 0.2 * 10, rel=1e-15)
    assert learned == pytest.approx(0.5 * 2 * 2.5, rel=1e-15)


def test_learned_coefficient_of_terms_with_other_factors_is_refused() -> None:
    """In `s * (mean + sum)` no factor is right for the coefficient."""
    problem = _Problem(lambda z, s: s * (z.mean() + z.sum()), [MEAN, MEAN])
    assert problem.plan(0.5, 0.5).hooks == ()
    with pytest.raises(CannotScale, match="learned coefficient"):
        problem.plan(0.5, 0.2)


def test_zero_factor_keeps_nan_out() -> None:
    """A mean over no rows is 0/0; with the factor 0 it adds nothing, whatever lies above it."""
    problem = _Problem(lambda z, s: s * (z[z < 0].sum() / 0.0) + z.sum(), [MEAN, MEAN])
    assert problem.gradients(0.0, 0.2) == (pytest.approx(0.2 * 10, rel=1e-15), 0.0)


def test_term_that_goes_in_once_has_its_own_factor() -> None:
    """A weight decay beside a mean: 0.7 of the mean and a third of the decay."""
    problem = _Problem(lambda z, s: z.mean() + s.square(), [FOLLOWING, ONCE])
    weight, learned = problem.gradients(0.7, 1 / 3)
    assert weight == pytest.approx(0.7 * 2.5, rel=1e-15)
    assert learned == pytest.approx(6 / 3, rel=1e-15)


def test_term_that_goes_in_once_goes_along_with_an_unknown_mean() -> None:
    """Until the denominators are known a decay is scaled like the mean, so that one ratio mends both."""
    problem = _Problem(lambda z, s: z.mean() + s.square(), [MEAN, ONCE])
    assert problem.plan(0.7, 1 / 3, is_final=False) == Plan(0.7, (), 0.7)


def test_term_that_goes_in_once_alone_is_shared_equally() -> None:
    """A loss of parameters alone counts a quarter in each of four pieces."""
    problem = _Problem(lambda z, s: s.square(), [ONCE])
    assert problem.gradients(0.25) == (0.0, 6 / 4)


def _assert_whole(
    loss: Callable[..., Tensor], model: nn.Module, batch: dict[str, Tensor], ub_size: int
) -> None:
    """The call in micro-batches has the loss and the gradients of plain PyTorch on the whole mini-batch."""
    expected = loss(**batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    got, expected = anybatch.apply(list(batch), ub_size)(loss)(**batch), expected.detach()
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    assert float((got - expected).abs()) <= 1e-12 * float(expected.abs())
    for leaf, gradient in zip(model.parameters(), gradients, strict=True):
        assert leaf.grad is not None
        assert float((leaf.grad - gradient).abs().max()) <= 1e-10 * largest


def _linear() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(3, 1).double(), torch.randn(12, 3, dtype=torch.float64)


def test_weight_decay_beside_two_masked_means_counts_once() -> None:
    """Two means with the same total but other shares in each piece leave the decay what it is."""
    model, x = _linear()
    one = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    two = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.float64)

    def loss(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        error = model(x)[:, 0]
        means = (error.square() * one).sum() / one.sum() + ((error - 1).abs() * two).sum() / two.sum()
        return means + model.weight.square().sum()

    _assert_whole(loss, model, {"x": x, "one": one, "two": two}, 4)


@pytest.mark.parametrize("counts", [(4, 4, 4), (2, 3, 4), (4, 1, 0)])
def test_weight_decay_beside_a_mean_with_an_epsilon_counts_once(counts: tuple[int, ...]) -> None:
    """The pieces' shares of such a mean sum to more than 1; those of the decay don't."""
    model, x = _linear()
    mask = torch.tensor([float(row < count) for count in counts for row in range(4)], dtype=torch.float64)

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        mean = (model(x)[:, 0].square() * mask).sum() / (mask.sum() + 1e-3)
        return mean + model.weight.square().sum()

    _assert_whole(loss, model, {"x": x, "mask": mask}, 4)
