"""The watermarks of Metal's allocator: two variables that torch reads once, and that must fit together.

Source: torch's MPSAllocator (torch 2.13). Above the high one an allocation fails; from the low one on memory
is given back early. A low one above the high one makes the first allocation fail.
"""

import os
from collections.abc import Mapping

import torch

from anybatch.errors import TechniqueError

HIGHEST = 2.0
_HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
_LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_HIGH_DEFAULT = 1.7
_LOW_DEFAULT = 1.4  # for memory that is shared with the host


def high_watermark() -> float:
    """What the allocator begins with; 0 stands for none."""
    return _read(_HIGH, _HIGH_DEFAULT)


def watermarks_for(fraction: float) -> Mapping[str, str]:
    """Both variables for a ceiling, by name."""
    low = _read(_LOW, _LOW_DEFAULT)
    return {_HIGH: repr(float(fraction)), _LOW: repr(min(low, float(fraction)))}


def set_watermarks(fraction: float) -> None:
    """Sets both variables of this process.

    Raises:
        TechniqueError: There is no such device; or there are tensors on it, so that torch has read them.
    """
    if not torch.backends.mps.is_available():
        raise TechniqueError(
            "`MemoryCap`: watermarks are Metal's. Got a machine on which torch has no mps. Leave them out."
        )
    before = {name: os.environ.get(name) for name in (_HIGH, _LOW)}
    os.environ.update(watermarks_for(fraction))
    # Asking begins the allocator, which reads them; so they are set before.
    held_bytes = torch.mps.current_allocated_memory()
    if held_bytes:
        _put_back(before)
        raise TechniqueError(
            f"`MemoryCap`: torch reads the watermarks before the first tensor on mps. Got {held_bytes} bytes "
            f"there already. Set them at the beginning of the program."
        )


def _put_back(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _read(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= HIGHEST:
        raise TechniqueError(
            f"`MemoryCap`: a watermark is a number from 0 to {HIGHEST}. Got {name}={text!r}. Unset it."
        )
    return value
