"""Mixed precision: matrix products in fewer digits, weights in float32."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch.amp import GradScaler

from anybatch.errors import TechniqueError
from anybatch.memory.device import autocast_state, widest_float
from anybatch.techniques.technique import Setting, Technique

_DTYPES = (torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True)
class Precision(Technique):
    """Runs forward under autocast: products are computed, and saved, in two bytes per value.

    Autocast is entered around the forward of each piece and never held from step to step, for it keeps copies
    of weights that a step makes stale. In float16 small gradients would become zero, so losses are scaled;
    bfloat16 has the range of float32 and needs no scaler.

    Error: not exact. An operation in `dtype` rounds each result to a relative 2^-9 (bfloat16) or 2^-12
    (float16); gradients of small networks are off by a few times that.

    Source: Micikevicius et al., "Mixed precision training", 2018; `torch.autocast`.

    Attributes:
        dtype: `torch.bfloat16` or `torch.float16`, or its name.

    Raises:
        TechniqueError: It is neither.

    >>> Precision("float16")
    Precision(dtype=torch.float16)
    """

    recommendation: ClassVar[int | None] = 2
    source: ClassVar[str] = "Micikevicius et al., Mixed precision training, 2018; torch.autocast"
    exactness: ClassVar[str] = (
        "Not exact: results of products are rounded to a relative 2^-9 (bfloat16) or 2^-12 (float16)."
    )

    dtype: torch.dtype | str = torch.bfloat16

    def __post_init__(self) -> None:
        dtype = _as_dtype(self.dtype)
        if dtype not in _DTYPES:
            raise TechniqueError(
                f"`Precision`: autocast computes in bfloat16 or float16. Got {self.dtype!r}. For float64, "
                "which mps does not have, call `model.double()` elsewhere; float32 needs no technique."
            )
        object.__setattr__(self, "dtype", dtype)

    def check(self, setting: Setting) -> None:
        dtypes = {each.dtype for each in setting.model.parameters() if each.is_floating_point()}
        if torch.float64 in dtypes and widest_float(setting.device) is not torch.float64:
            raise _refused(
                f"float64 parameters and {setting.device}, which has no float64",
                "Call `model.float()` before",
            )
        if dtypes and torch.float32 not in dtypes:
            names = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
            raise _refused(
                f"parameters in {names}, which autocast leaves as they are", "Call `model.float()` before"
            )
        if self.dtype is torch.float16 and torch.float16 in dtypes:
            raise _refused(
                "parameters in float16, whose gradients can't be unscaled", "Call `model.float()` before"
            )
        _check_autocast(setting.device, self._dtype)

    @contextmanager
    def forward(self, setting: Setting) -> Iterator[None]:
        if autocast_state(setting.device)[0]:
            raise _refused(
                f"autocast for {setting.device.type} that is on already, and keeps its copies of weights",
                "Take it away around the call",
            )
        with torch.autocast(setting.device.type, self._dtype):
            yield

    def scaler(self, setting: Setting) -> GradScaler | None:
        return GradScaler(setting.device.type) if self.dtype is torch.float16 else None

    @property
    def _dtype(self) -> torch.dtype:
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype


def _as_dtype(value: Any) -> Any:
    return getattr(torch, value, None) if isinstance(value, str) else value


def _check_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Does autocast work there? Where it does not, torch warns and goes on without."""
    if not torch.amp.is_autocast_available(device.type):
        raise _refused(f"{device}, which has no autocast", "Train in float32 there")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast(device.type, dtype)
    except (RuntimeError, UserWarning) as error:
        reason = f"{device} and {str(dtype).removeprefix('torch.')}, of which torch says: {error}"
        raise _refused(reason.rstrip("."), "Name the other dtype") from error


def _refused(what: str, advice: str) -> TechniqueError:
    return TechniqueError(
        f"`Precision`: forward runs in fewer digits, with weights in float32. Got {what}. {advice}."
    )
