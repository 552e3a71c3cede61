"""Training on the whole training set as one mini-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from anybatch.cli.demo.digits import Digits
from anybatch.cli.demo.scores import score
from anybatch.cli.demo.ways import Step, loss_of

__all__ = ["scores_of", "train", "whole_step"]

_CLASSES = 10
_LEARNING_RATE = 0.01


def whole_step(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """Loss and backward of the whole mini-batch at once, in plain PyTorch."""
    loss = loss_of(model, x, label)
    torch.autograd.backward(loss)
    return loss.detach()


def train(model: nn.Module, step: Step, digits: Digits, steps: int) -> Iterator[float]:
    """Trains for as many steps as are asked of it, on a schedule of `steps`, and yields each step's loss."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model, x=digits.images, label=digits.labels)
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def scores_of(model: nn.Module, digits: Digits, ub_size: int) -> dict[str, float]:
    """The figures of `score` on the test rows, predicted `ub_size` rows at a time."""
    predicted = torch.cat([model(images).argmax(1) for images in torch.split(digits.test_images, ub_size)])
    return score(predicted, digits.test_labels, _CLASSES)
