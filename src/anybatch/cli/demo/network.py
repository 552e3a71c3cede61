"""The demo's network: small in weights, large in activations, as networks for images are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["build_network"]

_WIDTH = 32
_FINE_BLOCKS = 8
_COARSE_BLOCKS = 2
_GROUPS = 8
_CLASSES = 10
# Small, so that depth does not slow the start; not 0, so that every weight has a gradient from the start.
_FIRST_SCALE = 0.1


class _Residual(nn.Module):
    """x + relu(norm(conv(x))), near the identity before training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, channels)
        nn.init.constant_(self.norm.weight, _FIRST_SCALE)

    def forward(self, images: Tensor) -> Tensor:
        """Adds the branch to its input, (rows, channels, height, width)."""
        return images + F.relu(self.norm(self.convolution(images)))


def build_network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A residual network from (rows, 1, 8, 8) to (rows, 10), the same weights for the same seed.

    GroupNorm normalises each row by itself; train-mode BatchNorm would mix the rows of a micro-batch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            *_convolution(1, _WIDTH),
            *(_Residual(_WIDTH) for _ in range(_FINE_BLOCKS)),
            nn.MaxPool2d(2),
            *_convolution(_WIDTH, 2 * _WIDTH),
            *(_Residual(2 * _WIDTH) for _ in range(_COARSE_BLOCKS)),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * _WIDTH * 4, _CLASSES),
        )
    return network.to(dtype)


def _convolution(in_channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(_GROUPS, out_channels),
        nn.ReLU(),
    )
