"""What a call may change beside gradients, as it was: buffers, modes, `requires_grad` and random states."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from anybatch.fit.generators import GeneratorState
from anybatch.memory.device import RandomState


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer and its value; an inference tensor has none, for it can't be written to."""

    tensor: Tensor | None
    value: Tensor | None


class _Parameter(NamedTuple):
    """A parameter, how often it had been written to, and whether it required grad."""

    tensor: Tensor
    version: int
    requires_grad: bool


class Snapshot:
    """Random states from its construction on, and buffers and modes of modules as they are added.

    A module is to be added before it runs. Restoring leaves alone what did not change: a buffer that a
    graph has saved must not be written to. It may be done again where it was cut short.
    """

    def __init__(self, devices: Iterable[torch.device] = (), generators: Iterable[Any] = ()) -> None:
        self._random = RandomState.capture(devices)
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()
        self._generators = [GeneratorState(generator) for generator in generators]
        self._modes: dict[Module, bool] = {}
        self._buffers: dict[tuple[Module, str], _Buffer] = {}
        self._parameters: dict[tuple[Module, str], _Parameter] = {}

    def __contains__(self, module: Module) -> bool:
        return module in self._modes

    def add(self, module: Module) -> None:
        """Records the mode and the buffers of one module, without its children; once."""
        if module in self._modes:
            return
        self._modes[module] = module.training
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter) and not parameter.is_inference():
                self._parameters[module, name] = _Parameter(
                    parameter, parameter._version, parameter.requires_grad
                )
        for name, tensor in module._buffers.items():
            self._buffers[module, name] = _recorded(tensor)

    @property
    def modules(self) -> list[Module]:
        return list(self._modes)

    def has_drawn_random_numbers(self) -> bool:
        """Did torch's, numpy's or Python's generators, or one of the user's own, move since the snapshot?"""
        return (
            RandomState.capture(self._random.accelerators) != self._random
            or random.getstate() != self._python
            or not _is_same(np.random.get_state(), self._numpy)
            or any(generator.has_moved() for generator in self._generators)
        )

    def changed_buffers(self) -> list[tuple[Module, str]]:
        """The buffers that changed since, each with its module and name."""
        return [key for key, buffer in self._buffers.items() if _has_changed(*key, buffer)]

    def changed_parameters(self) -> list[tuple[Module, str]]:
        """The parameters that were written to since, each with its module and name."""
        return [
            (module, name)
            for (module, name), (parameter, version, _) in self._parameters.items()
            if not parameter.is_inference() and parameter._version != version
        ]

    def restore(self) -> None:
        self.restore_random_state()
        self.restore_modules()

    def restore_random_state(self) -> None:
        self._random.restore()
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for generator in self._generators:
            generator.restore()

    def restore_modules(self) -> None:
        """Puts buffers, modes and `requires_grad` back; at last the buffers, which may take memory."""
        for module, mode in self._modes.items():
            module.training = mode
        for parameter, _, requires_grad in self._parameters.values():
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        with torch.no_grad():
            for (module, name), buffer in self._buffers.items():
                if _has_changed(module, name, buffer):
                    module._buffers[name] = buffer.tensor
                    if buffer.tensor is not None and buffer.value is not None:
                        buffer.tensor.copy_(buffer.value)


def _is_same(left: Any, right: Any) -> bool:
    """Are two states of numpy's generator equal? They are tuples with an array in them."""
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def _recorded(tensor: Tensor | None) -> _Buffer:
    if tensor is None or tensor.is_inference():
        return _Buffer(tensor, None)
    with torch.no_grad():
        return _Buffer(tensor, tensor.detach().clone())


def _has_changed(module: Module, name: str, buffer: _Buffer) -> bool:
    tensor = module._buffers.get(name)
    if tensor is not buffer.tensor:
        return True
    # By value: batch_norm writes its statistics without counting up their version (torch 2.13).
    return tensor is not None and buffer.value is not None and not torch.equal(tensor, buffer.value)
