"""The terms of a loss: found at the ends of linear ways down, refused where no sum over pieces gives them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.exact import graph
from anybatch.exact.labels import label
from anybatch.exact.reading import follow
from anybatch.exact.terms import Findings, Kind, Term, find, unlabelled

Loss = Callable[[Tensor, Tensor], Tensor]


def _found(loss: Loss) -> Findings:
    """The findings on a loss of features with rows, and of a positive parameter."""
    weight = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    scale = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(1, 19, dtype=torch.float64).reshape(6, 3)
    seen = [graph.read([loss(rows[:count] * weight, scale)]) for count in (6, 4)]
    labelled = label(seen[0], 6, seen[1], 4)
    assert labelled is not None
    return find(labelled, [0])


def _terms(loss: Loss) -> list[Term]:
    found = _found(loss)
    assert found.refusals == []
    return found.terms


def test_find_of_one_mean_is_one_term() -> None:
    """The root itself is the term, at the end of an empty path."""
    (term,) = _terms(lambda z, _: z.tanh().mean())
    assert (term.path, term.end, term.kind) == ((), "MeanBackward0", Kind.ROWS)


def test_find_follows_linear_nodes() -> None:
    """Coefficients, signs and constants lie on the path, by name."""
    (term,) = _terms(lambda z, _: 1 - 0.1 * (z.mean() / 4))
    assert [step.name for step in term.path] == ["RsubBackward1", "MulBackward0", "DivBackward0"]


def test_find_of_a_sum_of_losses_is_a_term_each() -> None:
    """Two means and a weight decay are three terms, of which the last has no rows."""
    terms = _terms(lambda z, s: z.mean() + F.mse_loss(z, torch.ones_like(z)) + s.square())
    assert [term.end for term in terms] == ["MeanBackward0", "MseLossBackward0", "PowBackward0"]
    assert [term.kind for term in terms] == [Kind.ROWS, Kind.ROWS, Kind.PARAMETERS]
    assert [term.branch for term in terms] == [2, 2, 1]


def test_found_path_leads_there_again() -> None:
    """A term is followed on the graph of another piece, also past the very first node of the graph."""
    scale = torch.ones((), requires_grad=True)
    losses = [scale + scale.new_ones(rows, 3).mul(scale).exp().mean() for rows in (6, 4)]
    large, small = (graph.read([loss]) for loss in losses)
    labelled = label(large, 6, small, 4)
    assert labelled is not None
    ends = {follow(term, graph.node_of(losses[1])).end.name() for term in find(labelled, [0]).terms}
    assert ends == {graph.LEAF, "MeanBackward0"}


def test_find_marks_learned_coefficients() -> None:
    """The step at which a parameter multiplies a term is kept, one above by number."""
    (term,) = _terms(lambda z, s: (z.mean() * s.exp()) / 3)
    assert [step.name for step in term.path] == ["DivBackward0", "MulBackward0"]
    assert term.learned == (1,)


def test_find_numbers_terms_of_the_same_shape() -> None:
    """Two means that look the same have keys of their own."""
    first, second = _terms(lambda z, _: z.tanh().mean() + z.exp().mean())
    assert first.key != second.key
    assert (first.occurrence, second.occurrence) == (0, 1)


def test_key_is_the_same_beside_other_terms() -> None:
    """A term that a later piece has beside one more is still the same."""
    (alone,) = _terms(lambda z, _: z.mean())
    beside, _ = _terms(lambda z, _: z.mean() + z.exp().sum())
    assert alone.key == beside.key


def test_find_leaves_other_losses_alone() -> None:
    """Only the wanted roots are looked at, and each term says to which it belongs."""
    leaf = torch.ones(6, 3, requires_grad=True)
    large, small = (graph.read([leaf[:n].exp().mean(), leaf[:n].exp().sum()]) for n in (6, 4))
    labelled = label(large, 6, small, 4)
    assert labelled is not None
    (term,) = find(labelled, [1]).terms
    assert (term.root, term.end) == (1, "SumBackward0")


def test_find_of_an_unknown_collapse_is_opaque() -> None:
    """A custom Function over rows has a term whose denominator can't be read."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, z: Tensor) -> Tensor:
            return z.sum()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0].expand(6, 3)

    (term,) = _terms(lambda z, _: 2 * Loss.apply(z))
    assert term.kind is Kind.OPAQUE


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, _: z.mean().sqrt(),
        lambda z, _: z.mean().log() + z.mean(),
        lambda z, _: z.sum() * z.mean(),
        lambda z, _: z.sum() / z.exp().sum(),
        lambda z, s: s / z.sum(),
        lambda z, _: z.mean().clamp(min=1),
        lambda z, _: z.std(),
        lambda z, _: z.exp().norm(),
        lambda z, _: z.logsumexp(0).sum(),
        lambda z, _: z[:, 0].max(),
        lambda z, _: z[0].sum(),
    ],
)
def test_find_refuses_what_no_sum_over_pieces_gives(loss: Loss) -> None:
    """Roots, ratios, products, extremes and picks over all rows of a piece are refused."""
    assert len(_found(loss).refusals) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, _: z.pow(2).sum(1).sqrt().mean(),
        lambda z, _: z.max(1).values.mean(),
        lambda z, _: (z.sum(1) / z.exp().sum(1)).mean(),
        lambda z, _: z[:, 0].mean(),
        lambda z, s: z.mean() / s,
        lambda z, _: torch.stack([z.mean(), z.sum()]).sum(),
    ],
)
def test_find_lets_through_what_each_row_has_for_itself(loss: Loss) -> None:
    """The same operations within a row, or with parameters, are none of the piece's business."""
    assert _found(loss).refusals == []


def _unlabelled(loss: Tensor) -> Term:
    return unlabelled(0, graph.node_of(loss))


def test_unlabelled_goes_down_a_single_way() -> None:
    """Without labels a loss is read as far as it does not branch: here to its sum."""
    term = _unlabelled(torch.ones(3, requires_grad=True).exp().sum() / 7)
    assert (term.end, term.kind) == ("SumBackward0", Kind.ROWS)
    assert [step.name for step in term.path] == ["DivBackward0"]


def test_unlabelled_stops_where_the_way_branches() -> None:
    """A sum of two losses can't be told apart without labels, but the constant above it is on the path."""
    leaf = torch.ones(3, requires_grad=True)
    term = _unlabelled((leaf.sum() + leaf.exp().sum()) / 7)
    assert (term.end, term.kind) == ("", Kind.OPAQUE)
    assert [step.name for step in term.path] == ["DivBackward0"]


def test_unlabelled_without_a_graph_is_opaque() -> None:
    """Of a loss that the caller weights, nothing is read."""
    assert unlabelled(2) == Term(2, (), "", Kind.OPAQUE)
