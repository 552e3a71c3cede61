"""Random generators of the user's own are seen to move, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anybatch.fit.generators import GeneratorState
from anybatch.fit.reach import in_reach

DRAWS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (torch.Generator, lambda generator: torch.rand(1, generator=generator).item()),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: generator.random()),
    "numpy, legacy": (lambda: np.random.RandomState(3), lambda generator: generator.rand()),
    "numpy, another kind": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda generator: generator.normal(),
    ),
    "Python": (lambda: random.Random(3), lambda generator: generator.gauss(0, 1)),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generator_is_put_back(kind: str) -> None:
    """After it is put back a generator draws the same numbers again."""
    make, draw = DRAWS[kind]
    generator = make()
    draw(generator)
    state = GeneratorState(generator)
    assert not state.has_moved()
    numbers = [draw(generator) for _ in range(3)]
    assert state.has_moved()
    state.restore()
    assert not state.has_moved()
    assert [draw(generator) for _ in range(3)] == numbers


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_are_in_reach(kind: str) -> None:
    """A generator is found in a closure, among arguments and in containers, and counted once."""
    generator = DRAWS[kind][0]()
    named = {"noise": [generator]}
    found = in_reach(lambda: (generator, named), [generator])
    assert found.generators == (generator,)
    assert found.modules == ()
    assert found.leaves == ()
