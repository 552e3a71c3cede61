"""Which layers take the statistics of the batch, in each way to run them."""

from __future__ import annotations

import pytest
from torch import nn

from anybatch.exact.batch_norm import FrozenNorms, Norms, batch_norms

LAYERS = {
    "training": (nn.BatchNorm1d(2), True, False),
    "in eval mode": (nn.BatchNorm2d(2).eval(), False, False),
    "without running statistics": (nn.BatchNorm2d(2, track_running_stats=False).eval(), True, True),
    "synchronised": (nn.SyncBatchNorm(2), True, False),
    "by group": (nn.GroupNorm(1, 2), False, False),
    "by instance": (nn.InstanceNorm1d(2), False, False),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_take_batch_statistics(kind: str) -> None:
    """Only layers that would normalise with the statistics of the batch count; frozen, those that must."""
    layer, by_itself, frozen = LAYERS[kind]
    assert batch_norms([nn.Linear(1, 1), layer]) == ([layer] if by_itself else [])
    assert Norms().taking_batch_statistics([layer]) == ([layer] if by_itself else [])
    found = FrozenNorms(is_compiled=False).taking_batch_statistics([layer])
    assert found == ([layer] if frozen else [])


def test_closing_twice_is_closing_once() -> None:
    """What is closed has no hooks and the modes that it had, and can be closed again."""
    layer = nn.BatchNorm1d(2)
    norms = FrozenNorms(is_compiled=True)
    norms.enter(layer)
    assert not layer.training
    for _ in range(2):
        norms.close()
        assert layer.training
        assert not layer._forward_hooks
