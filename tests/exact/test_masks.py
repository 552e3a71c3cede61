"""Does anything of a piece count: masks are proofs that nothing does, zero values are none."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybatch.exact.masks import is_masked_out, shows_what_counts

NOTHING, FIRST, SECOND = torch.zeros(4), torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 1.0, 0, 0])


def _is_masked_out(loss: Callable[[Tensor], Tensor]) -> bool:
    node = loss(torch.arange(8.0).reshape(4, 2).requires_grad_()).grad_fn
    assert node is not None
    return is_masked_out(node)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: (z[:, 0] * NOTHING).sum(),
        lambda z: (NOTHING * z[:, 0]).sum(),
        lambda z: (z * NOTHING[:, None]).mean(),
        lambda z: (-(z[:, 0] * NOTHING)).double().sum(),
        lambda z: (z * NOTHING[:, None]).reshape(2, 4).sum(),
        lambda z: z.masked_fill(torch.ones(4, 2).bool(), 0.0).sum(),
        lambda z: torch.where(torch.zeros(4, 1).bool(), z, torch.zeros(4, 2)).sum(),
        lambda z: torch.where(torch.ones(4, 1).bool(), torch.zeros(4, 2), z).sum(),
        lambda z: (z[:, 0] * FIRST * SECOND).sum(),
        lambda z: z[torch.zeros(4).bool()].sum(),
        lambda z: F.cross_entropy(z, torch.full((4,), -100), reduction="sum"),
        lambda z: (z[:, 0] * NOTHING + z[:, 1] * NOTHING).sum(),
        lambda z: torch.cat([z[:, 0] * NOTHING, z[:, 1] * NOTHING]).sum(),
    ],
)
def test_is_masked_out_where_every_element_is(loss: Callable[[Tensor], Tensor]) -> None:
    """Multiplied by zero, filled over, selected away or ignored: nothing counts."""
    assert _is_masked_out(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: (z[:, 0] * FIRST).sum(),
        lambda z: z.masked_fill(FIRST[:, None].bool(), 0.0).sum(),
        lambda z: torch.where(FIRST[:, None].bool(), z, torch.zeros(4, 2)).sum(),
        lambda z: (z[:, 0] * NOTHING + z[:, 1] * FIRST).sum(),
        lambda z: torch.cat([z[:, 0] * NOTHING, z[:, 1] * SECOND]).sum(),
        lambda z: (z[:, 0] * FIRST).flip(0).mul(SECOND).sum(),
        lambda z: (z - 100).relu().sum(),
        lambda z: (z * 0).exp().sum(),
        lambda z: F.cross_entropy(z, torch.tensor([-100, 0, -100, -100]), reduction="sum"),
        lambda z: z.sum(),
    ],
)
def test_is_masked_out_is_not_said_without_a_proof(loss: Callable[[Tensor], Tensor]) -> None:
    """One element that gets through is enough, and a satisfied hinge is zero without a mask."""
    assert not _is_masked_out(loss)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda z: (z[:, 0] * FIRST).sum(), True),
        (lambda z: (z[:, 0] * FIRST).double().mean(), True),
        (lambda z: z[FIRST.bool()].sum(), True),
        (lambda z: FIRST @ z[:, 0], True),
        (lambda z: F.cross_entropy(z, torch.zeros(4).long(), reduction="sum"), True),
        (lambda z: z.sum(), False),
        (lambda z: (z[:, 0] * FIRST).exp().sum(), False),
        (lambda z: (z[:, 0] * z[:, 1]).sum(), False),
    ],
)
def test_shows_what_counts_where_a_mask_is_in_sight(loss: Callable[[Tensor], Tensor], expected: bool) -> None:
    """A mask, a selection or labels right below the sum tell what counts, behind others they don't."""
    node = loss(torch.arange(8.0).reshape(4, 2).requires_grad_()).grad_fn
    assert node is not None
    assert shows_what_counts(node) is expected
