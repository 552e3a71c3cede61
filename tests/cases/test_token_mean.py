"""A language model's loss is a mean over counted tokens, not over rows (huggingface/transformers#24725)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import assert_whole

VOCABULARY, LENGTH, IGNORED = 11, 13, -100


def _language_model(counted: list[int], dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (len(counted), LENGTH))
    labels = ids.roll(-1, 1)
    for row, tokens in zip(labels, counted, strict=True):
        row[tokens:] = IGNORED
    net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).to(dtype)
    return net, {"ids": ids, "labels": labels}


def _flat(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _class_first(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(ids).transpose(1, 2), labels)


def _shifted(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits = net(ids)[:, :-1].reshape(-1, VOCABULARY)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1))


def _sum_over_count(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != IGNORED).sum()


def _masked_by_hand(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORED
    tokens = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (tokens * mask).sum() / mask.sum().clamp(min=1)


def _selected(net: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORED
    return F.cross_entropy(net(ids)[mask], labels[mask])


FORMS = [_flat, _class_first, _shifted, _sum_over_count, _masked_by_hand, _selected]
COUNTED = {
    "ragged": [12, 1, 7, 2, 3, 1],
    "long first": [13, 13, 1, 1, 1, 1],
    "long last": [1, 1, 1, 1, 1, 13],
    "empty rows": [0, 5, 0, 0, 9, 2],
    "odd rows": [12, 1, 7, 2, 3],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize("counted", COUNTED.values(), ids=list(COUNTED))
def test_token_mean_of_every_form_and_cut(
    form: Callable[..., Tensor], counted: list[int], dtype: torch.dtype
) -> None:
    """However the mean over tokens is written and cut, each token weighs as much as in the whole batch."""
    net, batch = _language_model(counted, dtype)
    for ub_size in range(1, len(counted) + 1):
        assert_whole(lambda ids, labels: form(net, ids, labels), batch, net, ub_size)


def test_token_mean_gives_the_known_loss() -> None:
    """The returned loss is the mean over all 26 counted tokens, not a mean of means (2.5261)."""
    net, batch = _language_model(COUNTED["ragged"], torch.float64)
    call = anybatch.apply(["ids", "labels"], ub_size=2)(lambda ids, labels: _flat(net, ids, labels))
    assert call(**batch).item() == pytest.approx(2.4085402684680233, abs=1e-10)


@pytest.mark.parametrize("ub_size", [1, 2, 4])
def test_token_mean_with_the_weight_by_hand(ub_size: int) -> None:
    """A count of the labels given as the weight is exact too, and needs no look at the graph."""
    net, batch = _language_model(COUNTED["empty rows"], torch.float64)
    assert_whole(
        lambda ids, labels: _flat(net, ids, labels),
        batch,
        net,
        ub_size,
        weight=lambda labels: (labels != IGNORED).sum(),
    )


@pytest.mark.parametrize(("rows", "ub_size"), [(8, 4), (10, 4), (9, 1), (12, 3)])
@pytest.mark.parametrize("offset", [1.0, 0.3])
def test_mean_over_weights_with_an_offset_is_exact(rows: int, ub_size: int, offset: float) -> None:
    """What is added to the sum of weights stands once in the whole, though each piece has it."""
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Linear(5, 3).double()
        batch = {"x": torch.randn(rows, 5, dtype=torch.float64), "w": torch.rand(rows).double() + 0.05}
        assert_whole(
            lambda x, w, net=net: (net(x).square().mean(1) * w).sum() / (w.sum() + offset),
            batch,
            net,
            ub_size,
        )
