"""A count is clamped in a piece without positives: it divides by 1 and adds nothing to the whole's count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactWarning

from .whole import assert_whole

CUTS = [(10, 4), (9, 1)]
Count = Callable[[Tensor], "Tensor | float"]

COUNTS: dict[str, Count] = {
    "clamp": lambda m: m.sum().clamp(min=1),
    "clamp of an integer": lambda m: (m > 0).sum().clamp(min=1),
    "clamp of a cast": lambda m: (m > 0).sum().float().clamp_min(1).double(),
    "clamp that Python reads": lambda m: float(m.sum().clamp(min=1)),
    "maximum": lambda m: torch.maximum(m.sum(), torch.ones((), dtype=m.dtype)),
    "where": lambda m: torch.where(m.sum() > 0, m.sum(), 1.0),
    "Python's max": lambda m: max(1, int(m.sum())),
    "Python's max of a float": lambda m: max(m.sum().item(), 1.0),
    "Python's or": lambda m: int(m.sum()) or 1,
}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "focal": lambda z, m, n: (
        (F.binary_cross_entropy_with_logits(z, m, reduction="none") * (1 - z.sigmoid()).square()).sum() / n
    ),
    "masked operands": lambda z, m, n: F.mse_loss(z * m, m, reduction="sum") / n,
    "weight": lambda z, m, n: F.binary_cross_entropy_with_logits(z, m, weight=m, reduction="sum") / n,
    "mask behind the square": lambda z, m, n: ((z - 1) * m).square().sum() / n,
    "two terms": lambda z, m, n: (z - m).abs().sum() / n + 0.1 * z.square().mean(),
}
POSITIVES: dict[str, Callable[[int], list[int]]] = {
    "first rows": lambda rows: [0, 1, 2, 3],
    "half of the rows": lambda rows: [0, 2, 3, 5, 6],
    "none": lambda rows: [],
}


def _problem(rows: int, positives: list[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(rows)
    mask = torch.zeros(rows, dtype=torch.float64)
    mask[positives] = 1
    return nn.Linear(5, 1).double(), {"x": torch.randn(rows, 5, dtype=torch.float64), "m": mask}


def _step(net: nn.Module, loss: Callable[..., Tensor], count: Count) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, m: loss(net(x)[:, 0], m, count(m))


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
@pytest.mark.parametrize("positives", POSITIVES.values(), ids=list(POSITIVES))
@pytest.mark.parametrize(
    ("loss", "count"),
    [
        pytest.param(loss, count, id=f"{loss}, {count}")
        for loss in LOSSES
        for count in COUNTS
        if loss == "focal" or count == "clamp"
    ],
)
def test_clamped_count_is_exact(
    loss: str, count: str, positives: Callable[[int], list[int]], rows: int, ub_size: int
) -> None:
    """In whichever way a count is clamped, pieces without positives divide by 1 and count nothing."""
    net, batch = _problem(rows, positives(rows))
    assert_whole(_step(net, LOSSES[loss], COUNTS[count]), batch, net, ub_size)


@pytest.mark.parametrize(("rows", "ub_size"), CUTS)
def test_weights_below_the_clamp_are_exact(rows: int, ub_size: int) -> None:
    """Where weights of a piece sum up to less than the clamp, they count as what they are."""
    net, batch = _problem(rows, [])
    batch["m"] = torch.rand(rows, dtype=torch.float64) * 0.6
    assert_whole(_step(net, LOSSES["focal"], COUNTS["clamp"]), batch, net, ub_size)


def test_evaluation_of_a_clamped_count_is_exact() -> None:
    """With gradients disabled the loss is that of the whole mini-batch too."""
    net, batch = _problem(12, [0, 1, 2])
    step = _step(net, LOSSES["focal"], COUNTS["Python's max"])
    with torch.no_grad():
        got = anybatch.apply(["x", "m"], ub_size=1)(step)(**batch)
        torch.testing.assert_close(got, step(**batch), rtol=1e-12, atol=0)


def test_count_that_nobody_sees_is_warned_about() -> None:
    """Lengths of Python's lists are not seen; a piece that divides by 1 is said to be in doubt."""
    net, batch = _problem(12, [])
    boxes = [[0.0] * count for count in (2, 1, 1, 3, 0, 1, 1, 1, 2, 0, 0, 0)]

    def step(x: Tensor, boxes: list[list[float]]) -> Tensor:
        return net(x).square().sum() / max(1, sum(map(len, boxes)))

    with pytest.warns(InexactWarning, match="divides its loss by exactly 1"):
        anybatch.apply(["x", "boxes"], ub_size=3)(step)(batch["x"], boxes)
