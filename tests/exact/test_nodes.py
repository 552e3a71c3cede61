"""Facts about single nodes: what losses divide by, and with what linear nodes multiply."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.exact import nodes

Z = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
LABELS = torch.tensor([0, -100, 2, 1])
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
IMAGE_LABELS = torch.tensor([[[0, 1], [-100, 2]]])


def _z() -> Tensor:
    return Z.clone().requires_grad_()


def _denominator(loss: Tensor) -> float:
    node = loss.grad_fn
    assert node is not None
    return float(nodes.denominator(node, node.name()))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda z: F.cross_entropy(z, LABELS), 3),
        (lambda z: F.cross_entropy(z, LABELS, weight=CLASS_WEIGHTS), 0.5 + 4.0 + 1.0),
        (lambda z: F.cross_entropy(z, LABELS.clamp(min=0), ignore_index=2), 3),
        (lambda z: F.cross_entropy(z, LABELS, reduction="sum"), 1),
        (lambda z: F.nll_loss(z.reshape(1, 3, 2, 2), IMAGE_LABELS), 3),
        (lambda z: F.mse_loss(z, torch.zeros_like(Z)), 12),
        (lambda z: F.mse_loss(z, torch.zeros_like(Z), reduction="sum"), 1),
        (lambda z: F.smooth_l1_loss(z[:, 0], torch.zeros(4).double()), 4),
        (lambda z: F.binary_cross_entropy_with_logits(z, torch.ones_like(Z)), 12),
        (lambda z: F.multi_margin_loss(z, LABELS.clamp(min=0)), 4),
        (lambda z: F.multi_margin_loss(z[0], LABELS[0]), 1),
        (lambda z: F.multilabel_margin_loss(z, torch.zeros(4, 3).long()), 4),
        (lambda z: z.sum(), 1),
        (lambda z: z.sum(0), 1),
        (lambda z: z.mean(), 12),
        (lambda z: z.mean(0), 4),
        (lambda z: z.mean((-2, -1)), 12),
        (lambda z: z.mean(dim=()), 12),
        (lambda z: torch.dot(z[:, 0], torch.ones(4).double()), 1),
    ],
)
def test_denominator_of_a_reduction(loss: Callable[[Tensor], Tensor], expected: float) -> None:
    """Each node that sums rows up divides by what its definition says."""
    assert _denominator(loss(_z())) == expected


def test_denominator_counts_more_targets_than_the_loss_has_digits() -> None:
    """Of 1001 targets a bfloat16 loss would remember 1000; they are counted."""
    z = torch.zeros(1001, 2, dtype=torch.bfloat16, requires_grad=True)
    assert _denominator(F.cross_entropy(z, torch.zeros(1001).long())) == 1001


def test_denominator_of_another_node_is_unknown() -> None:
    """A node that does not sum rows up has none."""
    with pytest.raises(nodes.Unreadable, match="Exp"):
        _denominator(_z().exp())


def _function(name: str, **attributes: float) -> type[torch.autograd.Function]:
    """A custom mean over rows that leaves attributes on its node."""

    def forward(ctx: object, z: Tensor) -> Tensor:
        vars(ctx).update(attributes)
        return z.sum() / 4

    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.expand(4, 3) / 4

    return type(
        name,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def test_denominator_that_a_function_declares() -> None:
    """A custom Function that sets the attribute on its `ctx` is read."""
    declares = _function("Declares", **{nodes.DENOMINATOR_ATTRIBUTE: 4.0})
    assert _denominator(declares.apply(_z())) == 4


def test_denominator_that_a_reader_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered reader is asked for the node of its Function, and for no other."""
    monkeypatch.setattr(nodes, "_readers", {})
    known, unknown = _function("Known", count=7.0), _function("Unknown", count=7.0)
    nodes.register(known, lambda node: node.count)
    assert _denominator(known.apply(_z())) == 7
    with pytest.raises(nodes.Unreadable):
        _denominator(unknown.apply(_z()))


def test_denominator_that_a_reader_can_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that returns None leaves the Function unread."""
    monkeypatch.setattr(nodes, "_readers", {})
    function = _function("Sometimes")
    nodes.register("SometimesBackward", lambda node: None)
    with pytest.raises(nodes.Unreadable):
        _denominator(function.apply(_z()))


def _constant(value: Tensor, edge: int) -> tuple[float, bool] | None:
    node = value.grad_fn
    assert node is not None
    found = nodes.constant(node, node.name(), edge)
    return None if found is None else (float(found.value), found.divides)


@pytest.mark.parametrize(
    ("value", "edge", "expected"),
    [
        (lambda z: z * 3, 0, (3, False)),
        (lambda z: torch.tensor(3.0) * z, 1, (3, False)),
        (lambda z: z / 4, 0, (4, True)),
        (lambda z: torch.add(z, z, alpha=5), 1, (5, False)),
        (lambda z: torch.add(z, z, alpha=5), 0, None),
        (lambda z: torch.rsub(z, 1.0), 0, (1, False)),
        (lambda z: -z, 0, None),
        (lambda z: z * z, 0, None),
        (lambda z: z / z.exp(), 0, None),
    ],
)
def test_constant_of_a_linear_node(
    value: Callable[[Tensor], Tensor], edge: int, expected: tuple[float, bool] | None
) -> None:
    """A constant operand is found on either side; a product of two results has none."""
    assert _constant(value(_z()), edge) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda z: z[:0].sum(), True),
        (lambda z: z[:0].mean(), True),
        (lambda z: z.sum(), False),
        (lambda z: F.cross_entropy(z, torch.full((4,), -100)), True),
        (lambda z: F.cross_entropy(z, LABELS), False),
        (lambda z: F.cross_entropy(z, LABELS, weight=torch.zeros(3).double()), True),
        (lambda z: z[:0].exp(), False),
    ],
)
def test_counts_nothing_of_an_empty_sum(loss: Callable[[Tensor], Tensor], expected: bool) -> None:
    """A sum over no elements counts nothing, and neither do labels that are all ignored or weightless."""
    node = loss(_z()).grad_fn
    assert node is not None
    assert nodes.counts_nothing(node, node.name()) is expected


def test_saved_operand_that_was_not_kept_is_unreadable() -> None:
    """A node that has no such operand says so in the words of this room."""
    node = _z().sum().grad_fn
    assert node is not None
    with pytest.raises(nodes.Unreadable, match="SumBackward0"):
        nodes.saved(node, "other")
