"""Every technique with options that are right, options that are wrong, and what it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybatch.techniques import (
    AccumulateInFloat32,
    Accumulation,
    Checkpointing,
    ChunkedHead,
    EmptyCache,
    Freeze,
    Loading,
    MemoryCap,
    Offload,
    Precision,
    Sampling,
    Setting,
    Technique,
)


def network() -> nn.Module:
    """Blocks that are alike, with BatchNorm and dropout, and a head."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.25)) for _ in range(3)
    ]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(6, 3)).double()


def setting() -> Setting:
    model = network()
    return Setting.of(model, torch.optim.AdamW(model.parameters()))


def setting_in_float32() -> Setting:
    model = network().float()
    return Setting.of(model, torch.optim.AdamW(model.parameters()))


@dataclass(frozen=True)
class Example:
    """A technique as the conformance test needs it.

    Attributes:
        make: The technique, with options that differ from the defaults where there are any.
        wrong: Options that it must refuse.
        setting: Makes what it works on.
    """

    make: Callable[[], Technique]
    wrong: tuple[dict[str, Any], ...] = ()
    setting: Callable[[], Setting] = field(default=setting)


EXAMPLES: dict[str, Example] = {
    "Checkpointing": Example(
        lambda: Checkpointing("0.*", every=2),
        wrong=(
            {"modules": ""},
            {"modules": ()},
            {"modules": 3},
            {"modules": ("auto", "0")},
            {"modules": int},
            {"every": 0},
            {"every": True},
            {"every": 1.5},
        ),
    ),
    "Offload": Example(
        lambda: Offload(min_bytes=4096, folder=Path(__file__).parent),
        wrong=(
            {"min_bytes": 0},
            {"min_bytes": True},
            {"min_bytes": 1.5},
            {"folder": ""},
            {"folder": 3},
        ),
    ),
    "Sampling": Example(
        lambda: Sampling(rows=2, stratify="targets", seed=3),
        wrong=(
            {},
            {"fraction": 0.5, "rows": 3},
            {"fraction": 0.0},
            {"fraction": 1.5},
            {"fraction": float("nan")},
            {"fraction": True},
            {"rows": 0},
            {"rows": 1.5},
            {"rows": 3, "stratify": ""},
            {"rows": 3, "stratify": -1},
            {"rows": 3, "seed": -1},
        ),
    ),
    "Precision": Example(
        lambda: Precision("float16"),
        wrong=(
            {"dtype": torch.float64},
            {"dtype": torch.float32},
            {"dtype": "half precision"},
            {"dtype": "nn"},
            {"dtype": 16},
        ),
        setting=setting_in_float32,
    ),
    "Loading": Example(
        lambda: Loading(workers=2, pin_memory=False, prefetch=4),
        wrong=(
            {"workers": -1},
            {"workers": "many"},
            {"workers": True},
            {"pin_memory": 1},
            {"pin_memory": "yes"},
            {"prefetch": 0},
            {"prefetch": 1.5},
            {"prefetch": 2, "workers": 0},
        ),
    ),
    "Freeze": Example(
        lambda: Freeze(["0.*.0", "1.bias"]),
        wrong=({"names": ""}, {"names": ()}, {"names": 3}, {"names": ("0", 1)}, {"names": {"0"}}),
    ),
    "EmptyCache": Example(
        lambda: EmptyCache(every=10),
        wrong=({"every": 0}, {"every": True}, {"every": 1.5}, {"every": "step"}),
    ),
    "MemoryCap": Example(
        lambda: MemoryCap(fraction=0.9),
        wrong=(
            {},
            {"max_bytes": 1 << 40, "fraction": 0.5},
            {"max_bytes": 0},
            {"max_bytes": 1e9},
            {"max_bytes": True},
            {"fraction": 0.0},
            {"fraction": 2.5},
            {"fraction": float("nan")},
        ),
    ),
    "ChunkedHead": Example(
        lambda: ChunkedHead("1", rows=4),
        wrong=({"head": ""}, {"head": 3}, {"rows": 0}, {"rows": True}, {"rows": 1.5}),
    ),
    "AccumulateInFloat32": Example(
        AccumulateInFloat32,
        setting=lambda: Setting.of(network().bfloat16()),
    ),
    "Accumulation": Example(
        lambda: Accumulation(steps=4),
        wrong=({"steps": 0}, {"steps": -1}, {"steps": True}, {"steps": 1.5}, {"steps": None}),
    ),
}
