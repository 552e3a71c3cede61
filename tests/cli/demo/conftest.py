"""A run of the demo in which everything came out as promised, without running it."""

from __future__ import annotations

import pytest

from anybatch.cli.demo.messages import Comparison, Found, Training
from anybatch.cli.demo.settings import MIB, Settings
from anybatch.cli.demo.stage import Outcome


@pytest.fixture
def settings() -> Settings:
    """A full run under a cap of 64 MiB."""
    return Settings(steps=40, ub_size=32, cap_bytes=64 * MIB, least_accuracy=0.97, compared_rows=None)


@pytest.fixture
def outcome() -> Outcome:
    """What a run shows that keeps every promise."""
    return Outcome(
        rows=1437,
        whole=Training(True, 0, "can't allocate memory", 200 * MIB, None, {}),
        pieces=Training(
            True,
            40,
            None,
            200 * MIB,
            37 * MIB,
            {"accuracy": 0.989, "precision": 0.988, "recall": 0.987, "f1": 0.986},
            Found(32, 90, 0, 33 * MIB, {"2": 7 * MIB, "32": 17 * MIB, "90": 33 * MIB, "200": 70 * MIB}),
        ),
        comparison=Comparison(
            362 * MIB,
            2e-16,
            3e-15,
            {"loop: loss / pieces": 0.63, "anybatch": 7e-16},
            {"other": "not installed"},
        ),
    )
