"""Running statistics of BatchNorm, pooled over the pieces and updated once per call (`"deferred"`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.errors import InexactError
from anybatch.exact.batch_norm import HookedNorms, tracks

_KNOWN_FORWARDS = (_BatchNorm.forward, SyncBatchNorm.forward)


@dataclass(eq=False)
class Pooled:
    """The statistics of the values seen so far, one per channel.

    Attributes:
        count: How many values a channel had.
        mean: Their mean.
        squares: The sum of their squared distances from it.
    """

    count: float
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, count: float, mean: Tensor, variance: Tensor, wide: torch.dtype) -> "Pooled":
        """Of one piece, with its unbiased variance; kept in a wide dtype."""
        return cls(count, mean.to(wide), variance.to(wide) * (count - 1))

    def add(self, other: "Pooled") -> None:
        """Takes in the values of another piece.

        Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances", 1979.
        """
        count = self.count + other.count
        distance = other.mean - self.mean
        self.mean = self.mean + distance * (other.count / count)
        self.squares = self.squares + other.squares + distance**2 * (self.count * other.count / count)
        self.count = count

    @property
    def variance(self) -> Tensor:
        """Unbiased."""
        return self.squares / (self.count - 1)


@dataclass(frozen=True, eq=False)
class _Kept:
    """What a layer has while its forward writes somewhere else."""

    mean: Tensor
    variance: Tensor
    tracked: Tensor | None
    momentum: float | None


class DeferredNorms(HookedNorms):
    """Layers normalise with the statistics of each piece; their running statistics are updated once.

    With momentum 1 a layer writes the statistics of its piece, as it computes them anyway, into copies.
    A layer that runs twice in the function is updated twice, as on the whole mini-batch.
    """

    coupled = (
        "BatchNorm in training mode normalises with the statistics of each micro-batch, not of the "
        "mini-batch; running statistics are updated once, with those of the mini-batch: {layers}. "
        'Use GroupNorm, `batch_norm="frozen"`, or put these layers in eval mode'
    )

    def __init__(self, widest: Callable[[torch.device], torch.dtype], *, is_compiled: bool) -> None:
        """Takes the floating dtype with the most digits on a device, and whether the function is compiled."""
        super().__init__(is_compiled=is_compiled)
        self._widest = widest
        self._pools: dict[_BatchNorm, list[Pooled]] = {}
        self._runs: dict[_BatchNorm, int] = {}
        self._counts = False

    @contextmanager
    def piece(self) -> Iterator[None]:
        self._runs.clear()
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def commit(self) -> None:
        with torch.no_grad():
            for layer, pools in self._pools.items():
                for pool in pools:
                    _update(layer, pool)

    def _reaches(self, layer: _BatchNorm) -> bool:
        return tracks(layer) and layer.track_running_stats and layer in self._handles

    def _take(self, layer: _BatchNorm) -> _Kept:
        mean, variance, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        assert mean is not None
        assert variance is not None
        kept = _Kept(mean, variance, tracked, layer.momentum)
        # All copies first: nobody puts back what was replaced before one of them failed.
        copies = mean.clone(), variance.clone(), None if tracked is None else tracked.clone()
        layer.running_mean, layer.running_var, layer.num_batches_tracked = copies
        layer.momentum = 1.0
        return kept

    def _put_back(self, layer: _BatchNorm, kept: _Kept) -> None:
        layer.running_mean, layer.running_var = kept.mean, kept.variance
        layer.num_batches_tracked, layer.momentum = kept.tracked, kept.momentum

    def _after(
        self, layer: _BatchNorm, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Tensor | None
    ) -> None:
        mean, variance, is_ours = layer.running_mean, layer.running_var, layer in self._open
        super()._after(layer, inputs, named, output)
        if is_ours and self._counts and output is not None and mean is not None and variance is not None:
            self._pool(layer, next(iter((*inputs, *named.values()))), mean, variance)

    def _pool(self, layer: _BatchNorm, values: Tensor, mean: Tensor, variance: Tensor) -> None:
        run = self._runs.get(layer, 0)
        self._runs[layer] = run + 1
        pools = self._pools.setdefault(layer, [])
        if not pools:
            _check_convention(layer, values, mean)
        piece = Pooled.of(values.numel() / mean.numel(), mean, variance, self._widest(mean.device))
        if run < len(pools):
            pools[run].add(piece)
        else:
            pools.append(piece)


def _update(layer: _BatchNorm, pool: Pooled) -> None:
    """What the layer's own forward does on the whole mini-batch."""
    tracked, momentum = layer.num_batches_tracked, layer.momentum
    if tracked is not None:
        tracked.add_(1)
    if momentum is None:
        momentum = 0.0 if tracked is None else 1.0 / float(tracked)
    for running, value in ((layer.running_mean, pool.mean), (layer.running_var, pool.variance)):
        assert running is not None
        running.copy_((1 - momentum) * running.to(value.dtype) + momentum * value)


def _check_convention(layer: Module, values: Tensor, mean: Tensor) -> None:
    """Checks that a layer with a forward of its own writes its statistics as torch's layers do.

    Raises:
        InexactError: Something else than the mean of the piece was written with momentum 1.
    """
    if type(layer).forward in _KNOWN_FORWARDS:
        return
    seen = values.detach().to(mean.dtype).transpose(0, 1).flatten(1)
    slack = 1e-3 * float(seen.abs().max())
    if not torch.allclose(seen.mean(1), mean, rtol=1e-2, atol=slack):
        kind = type(layer).__name__
        cause = f"{kind} does not keep its running statistics as torch's BatchNorm does"
        raise InexactError(
            f'`apply`: `batch_norm="deferred"` pools what layers write with momentum 1. Got {cause}. Use '
            '`batch_norm="micro"`.',
            (cause,),
        )
