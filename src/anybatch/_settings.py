"""The options of `apply`, checked at decoration."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler

from anybatch._parallel import parallel_devices
from anybatch.batch import BatchDim
from anybatch.errors import BatchError
from anybatch.exact.batch_norm import FrozenNorms, Norms
from anybatch.exact.running_statistics import DeferredNorms
from anybatch.exact.weights import Weights
from anybatch.memory.device import as_device, widest_float

if TYPE_CHECKING:
    from anybatch.fit.auto import Auto

_ON_INEXACT = ("raise", "warn", "ignore")
_BATCH_NORMS = ("micro", "deferred", "frozen", "exact")


@dataclass(frozen=True, eq=False)
class Settings:
    """How a function is to be called in micro-batches.

    Attributes:
        batch_names: The arguments that are cut.
        ub_size: The largest number of rows of a piece on one device, or how to find it.
        device: Where the pieces go; None for where the modules are.
        devices: The accelerators that share a piece; none where there is one device.
        weights: How pieces weigh.
        on_inexact: What to do when a loss is found not to add up.
        batch_dim: Where the rows are.
        batch_norm: What BatchNorm layers in training mode do.
        scaler: What scales the losses for backward.
    """

    batch_names: tuple[str, ...]
    ub_size: "int | Auto"
    device: torch.device | None
    devices: tuple[torch.device, ...]
    weights: Weights
    on_inexact: str
    batch_dim: BatchDim
    batch_norm: str
    scaler: GradScaler | None

    @property
    def shares(self) -> int:
        """How many devices share a piece."""
        return max(1, len(self.devices))

    def used_devices(self, home: torch.device | None) -> list[torch.device]:
        """The devices on which a function may draw random numbers whose pieces go to `home`."""
        return [device for device in dict.fromkeys((home, *self.devices)) if device is not None]

    def norms(self, *, is_cut: bool, is_compiled: bool) -> Norms:
        """What BatchNorm layers do in one call."""
        if self.batch_norm == "frozen":
            return FrozenNorms(is_compiled=is_compiled)
        if self.batch_norm == "deferred" and is_cut:
            return DeferredNorms(widest_float, is_compiled=is_compiled)
        return Norms()


def settings(
    batch_names: Sequence[str],
    ub_size: Any,
    device: Any,
    device_ids: Any,
    weight: Any,
    on_inexact: str,
    batch_dim: BatchDim,
    batch_norm: str,
    scaler: Any,
) -> Settings:
    """Checks the options.

    Raises:
        BatchError: The names are no strings, or one comes twice.
        ValueError: Another option is out of its range.
    """
    names = _names(batch_names)
    size = _size(ub_size)
    if on_inexact not in _ON_INEXACT:
        raise ValueError(f'`apply`: `on_inexact` is one of {_ON_INEXACT}. Got {on_inexact!r}. Pass "raise".')
    if batch_norm not in _BATCH_NORMS:
        raise ValueError(f'`apply`: `batch_norm` is one of {_BATCH_NORMS}. Got {batch_norm!r}. Pass "micro".')
    if not (scaler is None or isinstance(scaler, GradScaler)):
        raise ValueError(
            f"`apply`: `scaler` is a `torch.amp.GradScaler`. Got {type(scaler).__name__}. Pass one, or None."
        )
    if isinstance(batch_dim, Mapping):
        batch_dim = dict(batch_dim)
    devices = parallel_devices(device_ids)
    home = as_device(device) or next(iter(devices), None)
    return Settings(
        names,
        size,
        home,
        devices,
        Weights(weight, names),
        on_inexact,
        batch_dim,
        batch_norm,
        scaler,
    )


def refuse_later_options(whole_batch_loss: Any, batch_norm: str) -> None:
    """Refuses what is not built yet.

    Raises:
        NotImplementedError: An option is asked for that comes later.
    """
    later = {
        "whole_batch_loss": whole_batch_loss is not None,
        'batch_norm="exact"': batch_norm == "exact",
    }
    asked = [name for name, is_asked in later.items() if is_asked]
    if asked:
        raise NotImplementedError(
            f"`apply`: some options come with a later version. Got {', '.join(asked)}. Leave them out."
        )


def _size(ub_size: Any) -> "int | Auto":
    is_rows = hasattr(ub_size, "__index__") and not isinstance(ub_size, bool)
    if not is_rows:
        from anybatch.fit.auto import Auto  # loads when used (Rule 6)

        if isinstance(ub_size, Auto):
            return ub_size
        if isinstance(ub_size, str) and ub_size == "auto":
            return Auto()
    if not is_rows or operator.index(ub_size) < 1:
        raise ValueError(
            '`apply`: `ub_size` is a number of rows, an int of at least 1, "auto" or `Auto(...)`. '
            f"Got {ub_size!r}. Pass 1 or more."
        )
    return operator.index(ub_size)


def _names(batch_names: Any) -> tuple[str, ...]:
    is_list = isinstance(batch_names, (list, tuple))
    if not is_list or not all(isinstance(name, str) for name in batch_names):
        raise BatchError(
            f'`apply`: `batch_names` is a list of argument names, as in ["x", "label"]. Got {batch_names!r}.'
        )
    names = tuple(batch_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        fact = f"{twice} twice" if twice else "none"
        raise BatchError(f"`apply`: `batch_names` names each batch argument once, at least one. Got {fact}.")
    return names
