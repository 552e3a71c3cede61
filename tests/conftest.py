"""What every test shares: one thread and a fixed seed, so that results do not depend on the machine."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state of torch."""
    torch.manual_seed(0)
