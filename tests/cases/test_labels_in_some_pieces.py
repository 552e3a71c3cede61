"""A loss with another form where a piece has no labels, in whichever pieces the labels are."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError, InexactWarning

from .whole import assert_whole

Form = Callable[[nn.Module, Tensor, Tensor], Tensor]
CUTS = [(8, 4), (10, 4), (9, 1), (24, 2)]


def _zero(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counted = y >= 0
    return F.cross_entropy(net(x[counted]), y[counted]) if counted.any() else net(x).sum() * 0


def _selected(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counted = y >= 0
    if not counted.any():
        return 0.0 * net(x).mean()
    return F.cross_entropy(net(x), y.clamp(min=0), reduction="none")[counted].mean()


def _sum(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counted = y >= 0
    z = net(x)
    return F.cross_entropy(z[counted], y[counted], reduction="sum") if counted.any() else z.sum() * 0


def _extra(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z, counted = net(x), y >= 0
    loss = z.square().mean()
    return loss + 0.5 * F.cross_entropy(z[counted], y[counted]) if counted.any() else loss


def _masked(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counted = (y >= 0).double()
    losses = F.cross_entropy(net(x), y.clamp(min=0), reduction="none")
    return (losses * counted).sum() / counted.sum() if counted.any() else losses.sum() * 0


def _over_all(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counted = y >= 0
    losses = F.cross_entropy(net(x), y.clamp(min=0), reduction="none")
    return (losses * counted).mean() if counted.any() else losses.sum() * 0


FORMS: dict[str, Form] = {
    "zero": _zero,
    "selected": _selected,
    "sum": _sum,
    "extra term": _extra,
    "masked": _masked,
}


def _problem(rows: int, labelled: list[int], seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    net = nn.Linear(5, 4).double()
    y = torch.full((rows,), -1)
    y[labelled] = torch.randint(4, (len(labelled),))
    return net, {"x": torch.randn(rows, 5, dtype=torch.float64), "y": y}


def _step(net: nn.Module, form: Form) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: form(net, x, y)


LABELLED: dict[str, Callable[[int], list[int]]] = {
    "in the first piece": lambda rows: [0, 1, rows - 3],
    "in later pieces": lambda rows: [rows // 2, rows - 3],
    "in the last row": lambda rows: [rows - 1],
    "in the second half": lambda rows: list(range(rows // 2, rows)),
    "in some rows": lambda rows: list(range(3, rows, 4)),
    "in none": lambda rows: [],
}


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("where", LABELLED.values(), ids=list(LABELLED))
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.filterwarnings("ignore::anybatch.errors.InexactWarning")
def test_labels_in_some_pieces(
    form: Form, where: Callable[[int], list[int]], rows: int, ub_size: int
) -> None:
    """The loss is exact wherever the labels are; what could not be looked for in so few rows is said."""
    for seed in range(2):
        net, batch = _problem(rows, where(rows), seed)
        assert_whole(_step(net, form), batch, net, ub_size)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_enough_labels_in_later_pieces_need_no_warning(form: Form) -> None:
    """Where a piece has labels in both of its halves, its form is looked at like any other."""
    net, batch = _problem(16, list(range(8, 16)), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        assert_whole(_step(net, form), batch, net, 4)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_mean_over_all_rows_of_which_some_pieces_have_none_is_refused(rows: int, ub_size: int) -> None:
    """Rows that divide the loss of others although their own loss is zero can't be left out of the count."""
    net, batch = _problem(rows, [rows // 2, rows - 2], 0)
    with pytest.raises(InexactError):
        anybatch.apply(["x", "y"], ub_size=ub_size)(_step(net, _over_all))(**batch)


def test_form_that_can_not_be_learnt_is_refused_at_once() -> None:
    """A form that a single row has, and that no rows beside it explain, is not tried again and again."""
    calls: list[int] = []
    net, batch = _problem(8, [5], 0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        z = net(x)
        return z.square().mean() if (y < 0).all() else z.std() if len(x) > 1 else z.sum()

    with pytest.raises(InexactError):
        anybatch.apply(["x", "y"], ub_size=2)(step)(**batch)
    assert len(calls) < 60
