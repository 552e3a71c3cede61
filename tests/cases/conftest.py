"""The cases run in float64 unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def double_by_default() -> Iterator[None]:
    """Make float64 the default dtype for the length of one test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
