"""Buffers, modes and random states are as they were, bit for bit (Rule 3)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.fit.snapshot import Snapshot


def _names(changed: list[tuple[nn.Module, str]]) -> set[str]:
    return {f"{type(module).__name__}.{name}" for module, name in changed}


class Counter(nn.Module):
    """Buffers of every kind: written in place, replaced, and not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("late", None)
        self.steps: Tensor
        self.late: Tensor | None


def snapshot_of(*modules: nn.Module) -> Snapshot:
    snapshot = Snapshot()
    for module in modules:
        snapshot.add(module)
    return snapshot


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_put_back(kind: type[nn.Module]) -> None:
    """Running statistics are restored although torch writes them without a new version."""
    norm = kind(3, track_running_stats=True)
    snapshot = snapshot_of(norm)
    norm(torch.randn(8, 3, 4))
    assert not torch.equal(norm.running_mean, torch.zeros(3))
    snapshot.restore()
    torch.testing.assert_close(norm.running_mean, torch.zeros(3), rtol=0, atol=0)
    torch.testing.assert_close(norm.running_var, torch.ones(3), rtol=0, atol=0)
    assert int(norm.num_batches_tracked) == 0


def test_running_statistics_count_as_changed() -> None:
    """A module that updates its running statistics is seen to have changed them."""
    norm = nn.BatchNorm1d(3)
    snapshot = snapshot_of(norm)
    assert snapshot.changed_buffers() == []
    norm(torch.randn(8, 3))
    assert _names(snapshot.changed_buffers()) == {
        "BatchNorm1d.running_mean",
        "BatchNorm1d.running_var",
        "BatchNorm1d.num_batches_tracked",
    }


def test_buffers_keep_their_identity() -> None:
    """A buffer comes back as the same tensor with the same values, whether it was written or replaced."""
    module = Counter()
    steps, mean = module.steps, module.mean
    snapshot = snapshot_of(module)
    module.steps += 5
    module.mean = module.mean * 2
    module.late = torch.ones(1)
    assert _names(snapshot.changed_buffers()) == {"Counter.steps", "Counter.mean", "Counter.late"}
    snapshot.restore()
    assert module.steps is steps
    assert module.mean is mean
    assert module.late is None
    assert steps.tolist() == [0, 0]
    assert mean.tolist() == [1, 1, 1]


def test_replaced_and_then_written_buffer_is_put_back() -> None:
    """A buffer that was first written to and then replaced is the old tensor with the old values."""
    module = Counter()
    mean = module.mean
    snapshot = snapshot_of(module)
    module.mean.fill_(7)
    module.mean = torch.zeros(3)
    snapshot.restore()
    assert module.mean is mean
    assert mean.tolist() == [1, 1, 1]


def test_nan_in_a_buffer_is_put_back() -> None:
    """NaN, which equals nothing, is restored like any value."""
    module = Counter()
    module.mean[0] = float("nan")
    snapshot = snapshot_of(module)
    module.mean.fill_(2)
    snapshot.restore()
    assert module.mean.isnan().tolist() == [True, False, False]


def test_unchanged_buffer_is_not_written_to() -> None:
    """Restoring leaves a graph usable that has saved a buffer which nobody changed."""
    module = Counter()
    snapshot = snapshot_of(module)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * module.mean).sum()
    snapshot.restore()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]


def test_modes_are_put_back() -> None:
    """Each module gets its own mode back, not that of its parent."""
    inner, outer = nn.Dropout(), nn.Sequential()
    outer.append(inner)
    inner.eval()
    snapshot = snapshot_of(outer, inner)
    outer.train()
    outer.training = False
    snapshot.restore()
    assert (outer.training, inner.training) == (True, False)


def test_first_look_at_a_module_counts() -> None:
    """Adding a module again does not forget what it was at first."""
    module = Counter()
    snapshot = snapshot_of(module)
    module.steps += 1
    module.eval()
    snapshot.add(module)
    snapshot.restore()
    assert module.steps.tolist() == [0, 0]
    assert module.training
    assert snapshot.modules == [module]


def test_modules_are_added_without_their_children() -> None:
    """What was not added is not looked at."""
    child = Counter()
    parent = nn.Sequential(child)
    snapshot = snapshot_of(parent)
    assert parent in snapshot
    assert child not in snapshot
    child.steps += 1
    snapshot.restore()
    assert child.steps.tolist() == [1, 1]


def test_random_states_are_put_back() -> None:
    """torch, numpy and Python go on drawing the numbers that they would have drawn."""

    def draw() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), float(np.random.rand()), random.random()

    snapshot = Snapshot()
    expected = draw()
    assert snapshot.has_drawn_random_numbers()
    snapshot.restore()
    assert not snapshot.has_drawn_random_numbers()
    assert draw() == expected


def test_modules_can_be_put_back_without_random_states() -> None:
    """Restoring modules leaves the random states where they are, and the other way round."""
    module = Counter()
    snapshot = snapshot_of(module)
    module.steps += 1
    torch.rand(1)
    snapshot.restore_modules()
    assert module.steps.tolist() == [0, 0]
    assert snapshot.has_drawn_random_numbers()
    module.steps += 1
    snapshot.restore_random_state()
    assert module.steps.tolist() == [1, 1]
    assert not snapshot.has_drawn_random_numbers()


def test_inference_buffers_pass() -> None:
    """A buffer made in inference mode, which can't be written to outside of it, stays the same tensor."""
    module = Counter()
    with torch.inference_mode():
        module.mean = torch.ones(3)
    mean = module.mean
    snapshot = snapshot_of(module)
    module.mean = torch.zeros(3)
    snapshot.restore()
    assert module.mean is mean
