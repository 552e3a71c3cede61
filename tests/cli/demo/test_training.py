"""Training on the whole training set as one mini-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.cli.demo.digits import Digits
from anybatch.cli.demo.training import scores_of, train, whole_step


def small_digits() -> Digits:
    """Twelve images for training and seven for the test."""
    return Digits(torch.rand(12, 1, 8, 8), torch.arange(12) % 10, torch.rand(7, 1, 8, 8), torch.arange(7))


def small_model() -> nn.Module:
    """A linear classifier of the images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_train_yields_the_loss_before_each_step() -> None:
    """The first loss is that of the untrained model on all rows, and training lowers it."""
    digits, model = small_digits(), small_model()
    untrained = F.cross_entropy(model(digits.images), digits.labels).item()
    losses = list(train(model, whole_step, digits, steps=20))
    assert losses[0] == untrained
    assert len(losses) == 20
    assert losses[-1] < 0.8 * untrained


def test_train_takes_only_the_steps_asked_for() -> None:
    """One step of a longer schedule changes the weights once."""
    digits, model = small_digits(), small_model()
    before = model[1].weight.detach().clone()
    training = train(model, whole_step, digits, steps=20)
    assert torch.equal(model[1].weight, before)
    next(training)
    assert not torch.equal(model[1].weight, before)


def test_scores_do_not_depend_on_the_piece_size() -> None:
    """Every test row is predicted once, also in a last piece that is smaller."""
    digits, model = small_digits(), small_model()
    right = (model(digits.test_images).argmax(1) == digits.test_labels).sum().item()
    for ub_size in (1, 3, 7, 100):
        assert scores_of(model, digits, ub_size)["accuracy"] == right / 7
