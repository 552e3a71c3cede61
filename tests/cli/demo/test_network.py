"""The demo's network."""

from __future__ import annotations

import torch

from anybatch.cli.demo.network import build_network


def test_network_is_the_same_for_the_same_seed() -> None:
    """Weights depend on the seed alone, and building leaves torch's random state as it was."""
    state = torch.get_rng_state()
    first = [each.detach() for each in build_network(seed=1).parameters()]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert all(map(torch.equal, first, build_network(seed=1).parameters()))
    assert not torch.equal(first[0], next(build_network(seed=2).parameters()))


def test_network_treats_each_row_by_itself() -> None:
    """A row's output does not depend on the rows beside it, so that micro-batches can be exact."""
    network = build_network(seed=0, dtype=torch.float64)
    images = torch.rand(5, 1, 8, 8, dtype=torch.float64)
    whole = network(images)
    assert whole.shape == (5, 10)
    alone = torch.cat([network(images[row : row + 1]) for row in range(5)])
    torch.testing.assert_close(alone, whole, rtol=1e-12, atol=1e-12)


def test_every_weight_has_a_gradient() -> None:
    """No weight starts where its gradient is 0, which would make a comparison of gradients blind there."""
    network = build_network(seed=0, dtype=torch.float64)
    network(torch.rand(4, 1, 8, 8, dtype=torch.float64)).logsumexp(1).sum().backward()
    assert all(each.grad.abs().max() > 1e-6 for each in network.parameters())
