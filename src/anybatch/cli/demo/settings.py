"""What the demo trains, and on how much memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = [
    "DEFAULT_CAP_MIB",
    "ERROR_BOUND",
    "IGNORED_SHARE",
    "MALLOC_ENVIRONMENT",
    "MIB",
    "THREADS",
    "UNEVEN_CASE",
    "UNEVEN_ROWS",
    "UNEVEN_UB_SIZE",
    "Settings",
    "settings_for",
]

MIB = 1 << 20
DEFAULT_CAP_MIB = 64
# Threads that torch computes with in each child. The children run side by side, and threads that wait for
# each other on busy cores cost more than they bring.
THREADS = 1
# Rule 1, where everything is float64.
ERROR_BOUND = 1e-10

# 100 images by 32 are 32, 32, 32 and 4 where the cut is not balanced.
UNEVEN_ROWS = 100
UNEVEN_UB_SIZE = 32
IGNORED_SHARE = 0.4
UNEVEN_CASE = f"{UNEVEN_ROWS} images by {UNEVEN_UB_SIZE}, {IGNORED_SHARE:.0%} of the labels ignored"

# By default glibc keeps freed tensors in its heap, and what a process holds depends on its history. With a
# fixed threshold every tensor above it goes back to the system when it is freed.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@final
@dataclass(frozen=True)
class Settings:
    """The settings of one run, the same for every act.

    Attributes:
        steps: Optimizer steps of the training in micro-batches, each on the whole training set.
        ub_size: Largest micro-batch, in rows.
        cap_bytes: What training may hold on top of Python, torch and the data; None for no cap.
        least_accuracy: The test accuracy promised, 0 to 1; None where training is too short to promise one.
        compared_rows: Rows on which gradients are compared in float64, ten times as slow as float32; None
            for the whole mini-batch.
        seed: Seed of the weights and of everything drawn.
    """

    steps: int
    ub_size: int
    cap_bytes: int | None
    least_accuracy: float | None
    compared_rows: int | None
    seed: int = 0


def settings_for(*, quick: bool, cap_bytes: int | None) -> Settings:
    """The settings of the full demo, or of the quick one, which trains too briefly to promise an accuracy."""
    if quick:
        return Settings(steps=5, ub_size=32, cap_bytes=cap_bytes, least_accuracy=None, compared_rows=200)
    return Settings(steps=40, ub_size=32, cap_bytes=cap_bytes, least_accuracy=0.97, compared_rows=None)
