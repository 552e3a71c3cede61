"""Losses over pairs of rows lose pairs when the batch is cut, so they are refused (mdiephuis/SimCLR#13)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def _info_nce(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(similarity / 0.1, torch.arange(len(a)))


def _symmetric(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return (_info_nce(a, b, labels) + _info_nce(b, a, labels)) / 2


def _supervised(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    same = (labels[:, None] == labels).double()
    log_probability = (F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.5).log_softmax(1)
    return -((same * log_probability).sum(1) / same.sum(1)).mean()


def _batch_hard(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    distance, same = torch.cdist(a, b), labels[:, None] == labels
    hardest = distance.masked_fill(~same, -9).amax(1) - distance.masked_fill(same, 9e9).amin(1)
    return (hardest + 0.5).clamp(min=0).mean()


def _batch_all(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    distance, same = torch.cdist(a, b), labels[:, None] == labels
    triplets = distance[:, :, None] - distance[:, None, :] + 0.5
    return (triplets.clamp(min=0) * (same[:, :, None] & ~same[:, None, :])).mean()


def _spread(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    a = F.normalize(a, dim=1)
    return -(torch.cdist(a, a) + 4 * torch.eye(len(a))).amin(1).log().mean()


FORMS: list[Form] = [_info_nce, _symmetric, _supervised, _batch_hard, _batch_all, _spread]


def _pairs(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    q, k, labels = torch.randn(rows, 6), torch.randn(rows, 6), torch.arange(rows) // 2
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), {"q": q, "k": k, "labels": labels}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize(("rows", "ub_size"), [(8, 1), (8, 2), (8, 3), (8, 4), (9, 5)])
def test_pairs_are_refused(form: Form, rows: int, ub_size: int) -> None:
    """Whatever is computed from pairs of rows is refused at every cut, and nothing is left behind."""
    net, batch = _pairs(rows)
    call = anybatch.apply(list(batch), ub_size=ub_size)(lambda q, k, labels: form(net(q), net(k), labels))
    before = torch.get_rng_state()
    with pytest.raises(InexactError) as refusal:
        call(**batch)
    assert refusal.value.causes
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_pairs_in_one_piece_are_plain_pytorch() -> None:
    """A mini-batch in one piece keeps all its negatives."""
    net, batch = _pairs(8)
    call = anybatch.apply(list(batch), ub_size=8)(lambda q, k, labels: _info_nce(net(q), net(k), labels))
    assert call(**batch).item() == pytest.approx(
        _info_nce(net(batch["q"]), net(batch["k"]), batch["labels"]).item()
    )
