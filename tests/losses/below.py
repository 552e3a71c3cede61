"""What may lie below or around a loss: networks, casts, checkpoints, custom functions, compilers, tricks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .table import Loss, exact, unclear


class _Square(torch.autograd.Function):
    """A custom operator per element, below the loss."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return 2 * z * gradient


class _ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


def _straight_through(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z + (z.round() - z).detach(), y)


def _quantised(z: Tensor, centers: Tensor, y: Tensor) -> Tensor:
    nearest = centers[torch.cdist(z, centers).argmin(1)]
    commitment = F.mse_loss(z, nearest.detach()) * 0.25 + F.mse_loss(nearest, z.detach())
    return commitment + F.mse_loss(z + (nearest - z).detach(), y)


def _gradient_penalty(net: nn.ModuleDict, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net["score"](x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _energy_and_forces(net: nn.ModuleDict, x: Tensor, x2: Tensor, advantage: Tensor) -> Tensor:
    positions = x.detach().requires_grad_()
    energy = net["score"](positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return F.mse_loss(energy, advantage) + 10 * F.mse_loss(-slope, x2)


def _checkpointed_loss(z: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda t: F.mse_loss(t.tanh(), y), z, use_reentrant=False)


def _checkpointed_loss_reentrant(z: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda t: F.mse_loss(t.tanh(), y), z, use_reentrant=True)


def _counted(tokens: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(tokens.transpose(1, 2), tags)


def _compiled(backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
        # The limit of recompilations counts per code object, and all steps of the table share one.
        torch.compiler.reset()
        return torch.compile(step, backend=backend)

    return compiled


def _mixture_of_experts(z: Tensor, z2: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    gate = (z * alpha).softmax(1)
    weight, expert = gate.topk(2, dim=1)
    mixed = sum(weight[:, i, None] * (z2 * (1.0 + expert[:, i, None])) for i in range(2))
    return F.mse_loss(mixed, y)


def _routed_by_index(z: Tensor, z2: Tensor, y: Tensor, label: Tensor) -> Tensor:
    mixed = torch.zeros_like(z)
    for expert in range(4):
        rows = (label == expert).nonzero().squeeze(1)
        mixed = mixed.index_add(0, rows, z[rows] * (expert + 1) + z2[rows].tanh())
    return F.mse_loss(mixed, y)


_NETWORKS = {
    "recurrent, counted": lambda recurrent, tags: _counted(recurrent, tags),
    "time major, counted": lambda time_major, tags: _counted(time_major, tags),
    "attending, counted": lambda attending, tags: _counted(attending, tags),
    "attending by hand, counted": lambda attending_by_hand, tags: _counted(attending_by_hand, tags),
}

_ROWS = {
    "embedding bag": lambda bag, y: F.mse_loss(bag, y),
    "embeddings": lambda tokens: tokens.square().mean(),
    "embedding outputs pooled": lambda tokens, label: F.cross_entropy(tokens.mean(1), label),
    "first token": lambda attending, label: F.cross_entropy(attending[:, 0], label),
    "layer norm": lambda layer_normed: (layer_normed - 1).abs().mean(),
    "group norm": lambda image, blobs: F.binary_cross_entropy_with_logits(image, blobs),
    "instance norm": lambda instance_normed, blobs: F.mse_loss(instance_normed, blobs),
    "pooled": lambda pooled, label: F.cross_entropy(pooled, label),
    "frozen first layer and batch norm": lambda frozen, y: F.mse_loss(frozen, y),
    "weight norm": lambda weight_normed, y: F.mse_loss(weight_normed, y),
    "checkpointed network": lambda checkpointed, y: F.mse_loss(checkpointed, y),
    "reentrant checkpointed network": lambda checkpointed_reentrant, y: F.mse_loss(checkpointed_reentrant, y),
    "custom operator": lambda z, y: F.mse_loss(_Square.apply(z), y),
    "custom operator, mean": lambda z: _Square.apply(z).mean(),
    "reversed gradient": lambda z, z2, y, label: (
        F.mse_loss(z, y) + F.cross_entropy(_ReversedGradient.apply(z2), label)
    ),
    "straight through": _straight_through,
    "quantised": _quantised,
    "detached target": lambda z, z2: F.mse_loss(z, z2.detach()),
    "stopped per-row weights": lambda z, y: ((z - y).square().detach() * (z - y).abs()).mean(),
    "distilled": lambda z, z2: F.kl_div(
        (z / 2).log_softmax(1), (z2 / 2).softmax(1).detach(), reduction="batchmean"
    ),
    "gradient penalty": lambda score, net, x: _gradient_penalty(net, x) + 0.1 * score.mean(),
    "experts, mixed": _mixture_of_experts,
    "experts, routed": _routed_by_index,
    "complex modulus": lambda z, y: torch.view_as_complex(z.view(-1, 2, 2)).abs().mean() + F.mse_loss(z, y),
    "fourier": lambda z, y: (torch.fft.fft(z, dim=1) - torch.fft.fft(y, dim=1)).abs().mean(),
}

BELOW: list[Loss] = [
    *exact(_NETWORKS, weight=lambda tags: (tags != -100).sum()),
    *exact(_ROWS, weight="rows"),
    *exact(
        {"energy and forces": lambda score, net, x, x2, advantage: _energy_and_forces(net, x, x2, advantage)}
    ),
    *exact({"checkpointed loss": _checkpointed_loss}, weight="rows"),
    *exact(
        {
            "loss cast to float32": lambda z, y: F.mse_loss(z, y).float(),
            "operands cast to float32": lambda z, y: F.mse_loss(z.float(), y.float()),
            "counted, cast to float32": lambda z, ignored: F.cross_entropy(z.float(), ignored),
            "counted, cast to float32 and back": lambda z, ignored: F.cross_entropy(
                z.float(), ignored
            ).double(),
            "summed, cast to float32": lambda z, y, mask: (
                ((z - y).square().mean(1) * mask).sum().float() / mask.sum().float()
            ),
            "two groups, cast to float32": lambda z, y, ignored: (
                F.cross_entropy(z.float(), ignored) + F.mse_loss(z.float(), y.float())
            ),
        },
        inner=torch.float32,
    ),
    *exact(
        {
            "operands cast to bfloat16": lambda z, y: F.mse_loss(z.bfloat16(), y.bfloat16()),
            "counted, cast to bfloat16": lambda z, ignored: F.cross_entropy(z.bfloat16(), ignored),
            "loss cast to bfloat16": lambda z, y: F.mse_loss(z, y).bfloat16(),
        },
        inner=torch.bfloat16,
    ),
    *exact(
        {"compiled, mean": lambda z, y: F.mse_loss(z, y)},
        wrap=_compiled("eager"),
        weight="rows",
    ),
    *exact(
        {"compiled, counted": lambda z, ignored: F.cross_entropy(z, ignored)},
        wrap=_compiled("aot_eager"),
        weight=lambda ignored: (ignored != -100).sum(),
    ),
    # A compiled loss is one node, in which two denominators can't be told apart.
    *unclear(
        {"compiled, counted + mean": lambda z, y, ignored: F.cross_entropy(z, ignored) + F.mse_loss(z, y)},
        wrap=_compiled("aot_eager"),
    ),
    *unclear({"reentrant checkpointed loss": _checkpointed_loss_reentrant}),
]
