"""Where the rows are: labels from two runs at different numbers of rows, and what shapes alone refuse."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybatch.exact import graph
from anybatch.exact.labels import Label, Labelled, label, pretty

Loss = Callable[[Tensor, Tensor], Tensor]


def _labelled(loss: Loss, large_rows: int = 6, small_rows: int = 4) -> Labelled | None:
    """The graph of a loss of features with rows and a weight of three columns, labelled."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(18, dtype=torch.float64).reshape(6, 3)
    seen = [graph.read([loss(rows[:count] * weight, weight)]) for count in (large_rows, small_rows)]
    return label(seen[0], large_rows, seen[1], small_rows)


def _labels(loss: Loss) -> dict[str, Label]:
    found = _labelled(loss)
    assert found is not None
    return dict(zip(map(pretty, found.graph.names), found.labels, strict=True))


def _couplings(loss: Loss) -> str:
    found = _labelled(loss)
    assert found is not None
    return " ".join(found.couplings)


def test_rows_collapse_at_the_mean() -> None:
    """What changes its shape with the rows has them; the mean over them has summed them up."""
    labels = _labels(lambda z, _: z.tanh().mean())
    assert labels["Tanh"] is Label.ROWS
    assert labels["Mean"] is Label.COLLAPSED
    assert labels["AccumulateGrad"] is Label.PARAMETERS


def test_weight_decay_is_made_of_parameters() -> None:
    """What has no rows below is the same for every piece; the sum with the data is not."""
    labels = _labels(lambda z, weight: z.mean() + weight.pow(2).sum())
    assert labels["Pow"] is labels["Sum"] is Label.PARAMETERS
    assert labels["Add"] is Label.COLLAPSED


def test_mean_per_column_has_no_rows() -> None:
    """A result with a shape of its own is collapsed if it does not follow the rows."""
    assert _labels(lambda z, _: z.mean(0).tanh().sum())["Tanh"] is Label.COLLAPSED


def test_selection_of_as_many_rows_by_chance_still_has_rows() -> None:
    """Where both runs select two rows, shapes don't tell: what is selected has rows up to their sum."""
    labels = _labels(lambda z, _: z[torch.tensor([0, 3])].tanh().sum())
    assert labels["Index"] is labels["Tanh"] is Label.ROWS
    assert labels["Sum"] is Label.COLLAPSED


@pytest.mark.parametrize(("dim", "expected"), [(1, Label.ROWS), (0, Label.COLLAPSED)])
def test_selection_has_rows_until_they_are_reduced(dim: int, expected: Label) -> None:
    """A mean over columns leaves selected rows what they are, a mean over rows does not."""
    labels = _labels(lambda z, _: z[torch.tensor([0, 3])].mean(dim).tanh().sum())
    assert labels["Tanh"] is expected


def test_custom_function_of_parameters_may_hold_rows() -> None:
    """A custom Function may close over data, so it is never taken for a weight decay."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: Tensor) -> Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return gradients[0].expand(3)

    assert _labels(lambda _, weight: Loss.apply(weight))["Loss"] is Label.COLLAPSED


class _Rounded(torch.autograd.Function):
    """Weights rounded, as those who train for fewer bits do it."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_weights_rounded_by_a_custom_function_stay_parameters() -> None:
    """Weights go through a custom Function of their own, and into every row, which couples no rows."""
    found = _labelled(lambda z, weight: (z * _Rounded.apply(weight)).mean())
    assert found is not None
    labels = dict(zip(map(pretty, found.graph.names), found.labels, strict=True))
    assert labels["_Rounded"] is Label.PARAMETERS
    assert found.couplings == ()


def test_unlike_graphs_have_no_labels() -> None:
    """Two runs of other operations can't be compared."""
    assert _labelled(lambda z, _: z.mean() if len(z) > 4 else z.sum()) is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda padded, weight: (padded @ weight).square().mean(),
        lambda padded, weight: (padded * weight).tanh().sum(-1).exp().mean(),
        lambda padded, weight: torch.nn.functional.linear(padded, weight[None]).square().sum((1, 2)).mean(),
    ],
)
def test_padding_that_grows_like_the_rows_is_no_coupling(loss: Loss) -> None:
    """Rows padded to their longest, where more of them are by chance as much longer, are no pairs."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    seen = [graph.read([loss(torch.ones(rows, 2 * rows, 3).double(), weight)]) for rows in (6, 4)]
    found = label(seen[0], 6, seen[1], 4)
    assert found is not None
    assert found.couplings == ()


def test_one_value_per_pair_of_rows_is_a_coupling() -> None:
    """A result that grows with the square of the rows compares each row with each."""
    assert _couplings(lambda z, _: (z @ z.T).exp().mean()) == (
        "Mm gives one value per pair of rows, shape (6, 6)"
    )


def test_only_the_first_of_several_couplings_is_named() -> None:
    """What follows from one coupling is none of its own."""
    found = _labelled(lambda z, _: (z @ z.T).exp().mean())
    assert found is not None
    assert len(found.couplings) == 1


def test_pairs_within_a_row_are_no_coupling() -> None:
    """Attention over the tokens of a row grows with the rows once."""
    assert _couplings(lambda z, _: (z[:, :, None] * z[:, None, :]).exp().mean()) == ""


@pytest.mark.parametrize("statistic", [lambda z: z.mean(0), lambda z: z.mean(), lambda z: z.pow(2).sum()])
def test_value_of_the_piece_back_in_its_rows_is_a_coupling(statistic: Callable[[Tensor], Tensor]) -> None:
    """Rows less their mean, or divided by their norm, depend on which rows are together."""
    assert _couplings(lambda z, _: (z - statistic(z)).tanh().mean()).startswith("Sub brings ")


def test_statistic_of_each_row_is_no_coupling() -> None:
    """A normalisation within rows leaves them independent of each other."""
    assert _couplings(lambda z, _: (z - z.mean(1, keepdim=True)).tanh().mean()) == ""


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("MseLossBackward0", "MseLoss"),
        ("NllLoss2DBackward0", "NllLoss2D"),
        ("torch::autograd::AccumulateGrad", "AccumulateGrad"),
        ("", ""),
    ],
)
def test_pretty_is_the_name_that_users_know(name: str, known: str) -> None:
    """Numbers and suffixes of autograd are left out, those of the operation are not."""
    assert pretty(name) == known
