"""How far two runs lie apart, and how far they may."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch._verify.runs import Outcome

EXACT = 1e-10
_FALLBACK_ROUNDINGS = 64
_LARGEST_FALLBACK = 0.05
_MOST_ROUNDINGS = 1000


@dataclass(frozen=True)
class Difference:
    """How far a run lies from the one that it should equal.

    Attributes:
        gradient_ratio: The largest difference of a gradient, relative to the largest gradient; infinite where
            only one of the two has a gradient, or is nan.
        parameter: Where it is; None where there is none.
        loss_ratio: The largest difference of a loss, relative to the loss or to the largest gradient,
            whichever is larger.
    """

    gradient_ratio: float
    parameter: str | None
    loss_ratio: float

    @property
    def ratio(self) -> float:
        return max(self.gradient_ratio, self.loss_ratio)


NO_RUN = Difference(math.inf, None, math.inf)


def difference(expected: Outcome, got: Outcome) -> Difference:
    """Compares two runs of the same call."""
    largest = _largest(expected)
    distances = {name: _distance(left, right) for name, left, right in _pairs(expected, got)}
    parameter = max(distances, key=lambda name: distances[name], default=None)
    distance = distances[parameter] if parameter is not None else 0.0
    loss_ratio = max(
        _ratio(_gap(loss, got.losses.get(name, math.nan)), max(abs(loss), largest))
        for name, loss in expected.losses.items()
    )
    return Difference(_ratio(distance, largest), parameter if distance else None, loss_ratio)


def _largest(outcome: Outcome) -> float:
    gradients = [gradient for gradient in outcome.gradients.values() if gradient is not None]
    gradients += [gradient for _, gradient in outcome.strays.values()]
    finite = [dense[dense.isfinite()].abs() for dense in map(_dense, gradients)]
    return max((float(values.max()) for values in finite if values.numel()), default=0.0)


def _pairs(expected: Outcome, got: Outcome) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    for name in expected.gradients.keys() | got.gradients.keys():
        yield name, expected.gradients.get(name), got.gradients.get(name)
    # A tensor without a name that only one run knows was made by it.
    for key in expected.strays.keys() & got.strays.keys():
        leaf, gradient = expected.strays[key]
        yield f"a tensor of shape {tuple(leaf.shape)}", gradient, got.strays[key][1]


def _distance(left: Tensor | None, right: Tensor | None) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    left, right = _dense(left), _dense(right)
    is_same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(is_same, 0.0, (left - right).abs())
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


def _dense(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    return dense.to(wide)


def _gap(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    return math.inf if math.isnan(left - right) else abs(left - right)


def _ratio(distance: float, scale: float) -> float:
    return distance / (scale or math.ulp(0.0)) if distance else 0.0


@dataclass(frozen=True)
class Limit:
    """How far is not too far (Rule 1).

    Attributes:
        ratio: The largest difference, relative to the largest gradient, that counts as equal.
        reason: Why so much.
    """

    ratio: float
    reason: str


def least_limit(lowest: torch.dtype) -> Limit:
    """What is allowed in any case: 1e-10 in float64, two roundings in a graph with another lowest dtype."""
    if lowest in (torch.float64, torch.complex128):
        return Limit(EXACT, "all is float64")
    return Limit(2 * torch.finfo(lowest).eps, f"two roundings of {_name(lowest)}")


def is_rounding(lowest: torch.dtype, own: float | None) -> bool:
    """Is an error known, and no more than rounding makes? Above 1000 roundings something else has come in."""
    return own is not None and own <= _MOST_ROUNDINGS * torch.finfo(lowest).eps


def limit(lowest: torch.dtype, own: Sequence[float | None]) -> Limit:
    """What is allowed in a graph with this lowest dtype.

    Args:
        lowest: The dtype with the fewest digits in the graph of the whole mini-batch.
        own: How far runs of the whole mini-batch lie from it in float64; None where that is not known. One
            run may hit the true value by chance: the largest error of several is what rounding makes.

    Returns:
        Twice the largest own error, but `least_limit` at least: by chance a small mini-batch may be hardly
        rounded. Where none is known, or none is rounding: 64 roundings, 5 % at most.
    """
    least = least_limit(lowest)
    if least.ratio == EXACT:
        return least
    known = [each for each in own if each is not None and is_rounding(lowest, each)]
    if known:
        twice = Limit(2 * max(known), f"twice the mini-batch's own error in {_name(lowest)}")
        return max(least, twice, key=lambda each: each.ratio)
    fallback = min(_FALLBACK_ROUNDINGS * torch.finfo(lowest).eps, _LARGEST_FALLBACK)
    return Limit(fallback, f"{_FALLBACK_ROUNDINGS} roundings of {_name(lowest)}; its own error is not known")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
