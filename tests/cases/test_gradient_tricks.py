"""What changes gradients on their way and no values: tensor hooks, own backwards, parts that are detached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.errors import InexactError

from .whole import assert_whole

IGNORED = -100
CUTS = [(8, 4), (10, 4), (9, 1), (12, 3), (40, 20)]
Trick = Callable[[Tensor, Tensor], Tensor]


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class _Shared(torch.autograd.Function):
    """A product whose backward divides what goes to the weight by the number of rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradient * weight, (gradient * hidden).sum(0) / len(hidden)


def _hooked(hidden: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    hidden.register_hook(hook)
    return hidden


def _scaled(hidden: Tensor, scale: Tensor) -> Tensor:
    return hidden * scale + (hidden * (1 - scale)).detach()


class _Net(nn.Module):
    """An encoder, a trick on what it gives, and a deep head with more leaves than a look at the tail sees."""

    def __init__(self, trick: Trick, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3))
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.head = nn.Sequential(*layers, nn.Linear(8, 3))
        self.trick, self.is_checkpointed = trick, is_checkpointed
        self.double()

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = self.encoder(x)
        if self.is_checkpointed:
            hidden = checkpoint(self.trick, hidden * self.scale, label, use_reentrant=False)
        else:
            hidden = self.trick(hidden * self.scale, label)
        return F.cross_entropy(self.head(hidden), label)


def _net(trick: Trick, seed: int, **options: bool) -> _Net:
    torch.manual_seed(seed)
    net = _Net(trick, **options)
    net.encoder[1].p = 0.0
    return net


def _batch(rows: int, *, ignored: bool) -> dict[str, Tensor]:
    label = torch.arange(rows) * 7 % 3
    if ignored:
        label[1::3] = IGNORED
    return {"x": torch.randn(rows, 5, dtype=torch.float64), "label": label}


PER_ROW: dict[str, Trick] = {
    "a hook that clips": lambda h, y: _hooked(h, lambda g: g.clamp(-1e-3, 1e-3)),
    "a backward that clips": lambda h, y: _Clipped.apply(h),
    "a hook that keeps the sign": lambda h, y: _hooked(h, torch.sign),
    "a hook that scales": lambda h, y: _hooked(h, lambda g: 0.1 * g),
    "a hook that scales each row": lambda h, y: _hooked(h, lambda g: g * (y[:, None] + 1)),
    "a straight-through estimator": lambda h, y: h + (h.round() - h).detach(),
    "a share that is detached": lambda h, y: _scaled(h, torch.tensor(0.25, dtype=h.dtype)),
}
OVER_ROWS: dict[str, Trick] = {
    "a hook that normalises": lambda h, y: _hooked(h, lambda g: g / g.norm()),
    "a hook that centres": lambda h, y: _hooked(h, lambda g: g - g.mean(0)),
    "a hook that clips by the norm": lambda h, y: _hooked(h, lambda g: g * (1e-2 / g.norm()).clamp(max=1)),
    "a share of the count": lambda h, y: _scaled(h, 1 / (y >= 0).sum()),
    "rows weighted by their part": lambda h, y: _scaled(h, (y + 1.0)[:, None] / (y + 1.0).sum()),
    "a backward over the rows": lambda h, y: _Shared.apply(h, torch.ones(8, dtype=h.dtype)),
}


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("trick", PER_ROW.values(), ids=list(PER_ROW))
@pytest.mark.parametrize("ignored", [False, True])
def test_what_each_row_does_to_its_own_gradient_is_exact(
    trick: Trick, rows: int, ub_size: int, ignored: bool
) -> None:
    """Each row's gradient is what it is in the whole, also past a hook that is not linear."""
    for seed in range(2):
        net = _net(trick, seed)
        assert_whole(net, _batch(rows, ignored=ignored), net, ub_size)


@pytest.mark.parametrize("ub_size", [3, 4])
def test_tricks_inside_of_a_checkpoint(ub_size: int) -> None:
    """A checkpoint runs forward again while the probe's gradients are taken, in the modes of the probe."""
    net = _net(PER_ROW["a hook that clips"], 0, is_checkpointed=True)
    assert_whole(net, _batch(10, ignored=True), net, ub_size)


def test_checkpoint_around_dropout_is_compared_in_eval_mode() -> None:
    """A model with dropout in training mode is probed in eval mode, its checkpoints too."""
    net = _net(OVER_ROWS["a hook that centres"], 0, is_checkpointed=True)
    net.encoder[1].p = 0.3
    with pytest.raises(InexactError, match="gradient"):
        anybatch.apply(["x", "label"], ub_size=4)(net)(**_batch(10, ignored=False))
    assert net.encoder[1].training


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("trick", [t for n, t in OVER_ROWS.items() if "backward" not in n])
def test_what_mixes_gradients_of_rows_is_refused(trick: Trick, rows: int, ub_size: int) -> None:
    """A loss of the right value whose gradient depends on which rows are together is refused."""
    for seed in range(2):
        net = _net(trick, seed)
        with pytest.raises(InexactError, match="the gradient depends on which rows are together"):
            anybatch.apply(["x", "label"], ub_size=ub_size)(net)(**_batch(rows, ignored=False))
        assert all(parameter.grad is None for parameter in net.parameters())


def test_backward_of_a_custom_function_is_looked_at_below_each_input() -> None:
    """What goes wrong on the way to its weight alone does not show in the layers below it."""
    net = _net(lambda h, y: h, 0)
    net.trick = lambda h, y: _Shared.apply(h, net.scale)
    with pytest.raises(InexactError, match="the gradient depends on which rows are together"):
        anybatch.apply(["x", "label"], ub_size=4)(net)(**_batch(12, ignored=False))


def test_hook_that_is_not_linear_costs_a_count_only_where_something_is_counted() -> None:
    """Without ignored labels all factors are known beforehand, and the second call runs each piece once."""
    net = _net(PER_ROW["a hook that scales"], 0)
    call = anybatch.apply(["x", "label"], ub_size=4)(net)
    batch = _batch(12, ignored=True)
    call(**batch)
    runs: list[int] = []
    net.register_forward_pre_hook(lambda module, arguments: runs.append(1))
    call(**batch)
    assert len(runs) == 3


@pytest.mark.parametrize("ub_size", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scale_that_is_one_in_the_first_rows_is_looked_at_elsewhere(dtype: torch.dtype, ub_size: int) -> None:
    """A share by a count that is clamped to 1 in the first pieces is seen in those that have more."""
    net = _net(lambda h, y: _scaled(h, 1 / (y == 1).sum().clamp(min=1).to(dtype)), 0).to(dtype)
    label = torch.tensor([0, 1, *[0] * 8, *[0, 1] * 7])
    with pytest.raises(InexactError, match="the gradient depends on which rows are together"):
        anybatch.apply(["x", "label"], ub_size=ub_size)(net)(x=torch.randn(24, 5, dtype=dtype), label=label)
