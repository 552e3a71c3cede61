"""Random generators of the user's own, beside the default ones: their state, and how it is put back."""

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any, final

import torch


def is_generator(value: Any) -> bool:
    """Is it a random generator of torch's, numpy's or Python's?"""
    return isinstance(value, (torch.Generator, random.Random, *_numpy_kinds()))


def _numpy_kinds() -> tuple[type, ...]:
    """What was never imported has made no generators, and takes long to import."""
    module = sys.modules.get("numpy.random")
    return () if module is None else (module.Generator, module.RandomState)


def state_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How the state of a generator is read, and how it is set."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if not hasattr(generator, "bit_generator"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


@final
class GeneratorState:
    """The state that a generator had when this was made."""

    def __init__(self, generator: Any) -> None:
        self._read, self._set = state_access(generator)
        self._state = self._read()

    def has_moved(self) -> bool:
        state = self._read()
        if isinstance(state, torch.Tensor):
            return not torch.equal(state, self._state)
        return pickle.dumps(state) != pickle.dumps(self._state)  # numpy's hold arrays

    def restore(self) -> None:
        self._set(self._state)
