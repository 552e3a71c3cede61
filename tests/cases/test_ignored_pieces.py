"""A piece without a counted label divides by nothing and still adds nothing (pytorch/pytorch#70348)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import assert_whole

IGNORED = -100


def _masked(z: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).to(z.dtype)
    return (F.cross_entropy(z, labels.clamp(min=0), reduction="none") * mask).sum() / mask.sum()


def _selected(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels.clamp(min=0), reduction="none")[labels >= 0].mean()


def _clamped(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels, reduction="sum") / (labels >= 0).sum().clamp(min=1)


def _two_terms(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels) + 0.1 * z.square().mean()


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": F.cross_entropy,
    "label smoothing": lambda z, labels: F.cross_entropy(z, labels, label_smoothing=0.1),
    "class weights": lambda z, labels: F.cross_entropy(
        z, labels, weight=torch.tensor([0.1, 1.0, 5.0], dtype=z.dtype)
    ),
    "nll": lambda z, labels: F.nll_loss(z.log_softmax(1), labels),
    "masked mean": _masked,
    "selected mean": _selected,
    "clamped count": _clamped,
    "two terms": _two_terms,
}
LABELS = {
    "in the middle": [0, 2, IGNORED, IGNORED, 1, IGNORED],
    "first": [IGNORED, IGNORED, IGNORED, IGNORED, 2, 1],
    "last": [0, 1, 2, IGNORED, IGNORED, IGNORED],
    "all but one": [IGNORED, IGNORED, IGNORED, 2, IGNORED, IGNORED],
    "all": [IGNORED] * 6,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("labels", LABELS.values(), ids=list(LABELS))
def test_ignored_pieces_add_nothing(
    form: Callable[[Tensor, Tensor], Tensor], labels: list[int], dtype: torch.dtype
) -> None:
    """Pieces without labels leave the rest exact; a mini-batch without labels is as in plain PyTorch."""
    x = torch.randn(6, 4).to(dtype)
    net = nn.Linear(4, 3).to(dtype)
    for ub_size in (1, 2, 3, 4):
        batch = {"x": x, "labels": torch.tensor(labels)}
        assert_whole(lambda x, labels: form(net(x), labels), batch, net, ub_size)


def test_ignored_pieces_give_the_known_loss() -> None:
    """The loss of three counted labels of six is their mean and not NaN."""
    x = torch.randn(6, 4)
    labels = torch.tensor(LABELS["in the middle"])
    net = nn.Linear(4, 3)
    call = anybatch.apply(["x", "labels"], ub_size=2)(lambda x, labels: F.cross_entropy(net(x), labels))
    assert call(x=x, labels=labels).item() == pytest.approx(1.2018233521, abs=1e-10)


def test_ignored_pieces_with_the_weight_by_hand() -> None:
    """A piece whose weight is 0 adds nothing, although its own loss is NaN."""
    x = torch.randn(6, 4)
    net = nn.Linear(4, 3)
    batch = {"x": x, "labels": torch.tensor(LABELS["in the middle"])}
    for form in FORMS:
        if form not in ("class weights", "two terms"):
            assert_whole(
                lambda x, labels, form=form: FORMS[form](net(x), labels),
                batch,
                net,
                2,
                weight=lambda labels: (labels >= 0).sum(),
            )
