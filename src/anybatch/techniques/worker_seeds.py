"""Seeds for the generators that a dataset holds itself, in each worker of a loader."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from anybatch.fit.generators import is_generator

_LARGEST_CONTAINER = 64
_DEEPEST = 6
_BITS = 0xFFFFFFFF


@final
@dataclass(frozen=True)
class SeededWorker:
    """What a worker runs first: it seeds the dataset's own generators, each by the worker's seed.

    A worker gets a copy of the dataset, so that without this all of them would draw the same. The default
    generators of torch, numpy and Python are seeded by the loader.

    Attributes:
        then: What is run afterwards.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None, "run by a loader in its worker"
        for index, generator in enumerate(own_generators(info.dataset)):
            seed_generator(generator, [info.seed & _BITS, info.seed >> 32, index])
        if self.then is not None:
            self.then(worker)


def own_generators(dataset: Any) -> list[Any]:
    """The generators that a dataset holds, in its attributes and in what these hold, each once."""
    found: dict[int, Any] = {}
    for value in _held(dataset, _DEEPEST, set()):
        if is_generator(value):
            found.setdefault(id(value), value)
    return list(found.values())


def seed_generator(generator: Any, entropy: list[int]) -> None:
    """Puts a generator of torch's, numpy's or Python's where a seed says."""
    seeds = np.random.SeedSequence(entropy)
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seeds).state
        return
    seed = int(seeds.generate_state(1)[0])
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, (random.Random, np.random.RandomState)):
        generator.seed(seed)


def _held(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen or isinstance(value, (Tensor, np.ndarray, type)):
        return
    seen.add(id(value))
    yield value
    if depth and not is_generator(value):
        for child in _children(value):
            yield from _held(child, depth - 1, seen)


def _children(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        children = value.values() if isinstance(value, dict) else value
        return list(children) if len(value) <= _LARGEST_CONTAINER else []
    return list(getattr(value, "__dict__", {}).values())
