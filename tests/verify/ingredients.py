"""Functions that mix what makes micro-batches differ from the mini-batch, each ingredient at will."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Queue(nn.Module):
    """Adds what earlier calls have left in a buffer."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Add the queue, and push the mean of the rows."""
        result = x + self.queue
        self.queue = 0.5 * self.queue + x.detach().mean(0)
        return result


class Network(nn.Module):
    """Two hidden layers with the wanted kinds of layers between."""

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if "BatchNorm" in wanted else nn.Identity()
        self.drop = nn.Dropout(0.3) if "dropout" in wanted else nn.Identity()
        self.state = Queue() if "state" in wanted else nn.Identity()
        self.middle = nn.Linear(8, 8)
        self.last_drop = nn.Dropout(0.2) if "dropout" in wanted else nn.Identity()
        self.outer = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Give logits."""
        hidden = self.drop(self.norm(self.state(self.inner(x)).tanh()))
        return self.outer(self.last_drop(self.middle(hidden)))


def function_with(wanted: Collection[str]) -> tuple[Callable[..., Tensor], Network]:
    """A function with some of "BatchNorm", "dropout", "state", "inputs" and "loss", and its network."""
    network = Network(wanted)

    def train_fn(x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None and "inputs" in wanted:
            x = x * scale.clone()
            scale.mul_(0.5)
        loss = F.cross_entropy(network(x), y)
        return loss.sqrt() if "loss" in wanted else loss

    return train_fn, network


def mini_batch(rows: int = 10) -> dict[str, Tensor]:
    """Rows of six features, and labels."""
    return {"x": torch.randn(rows, 6, dtype=torch.float64), "y": torch.randint(0, 3, (rows,))}


def arguments() -> dict[str, Tensor]:
    """A mini-batch, and a scale that all rows share."""
    return {**mini_batch(), "scale": torch.ones(3, 1, dtype=torch.float64)[1]}
