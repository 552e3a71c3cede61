"""Things that a call may change, each remembered as it was and able to be put back."""

import pickle
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any, final

import numpy as np
import torch
from torch.nn import Module

from anybatch.fit.generators import is_generator, state_access
from anybatch.memory.device import RandomState

PLAIN = (int, float, complex, str, bytes, bool, type(None))
SEQUENCES = (list, set, deque)
DEFAULT_GENERATORS = frozenset({"torch", "numpy", "Python"})


class Kept(ABC):
    """One thing, as it was.

    Attributes:
        name: What the user calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def changes(self) -> list[str]:
        """What is another now, by name."""

    @abstractmethod
    def restore(self) -> None:
        """Makes it what it was; leaves alone what did not change."""


@final
class KeptItems(Kept):
    """Which objects a list, set or deque holds; not what is in them."""

    def __init__(self, name: str, container: Any) -> None:
        super().__init__(name)
        self._container = container
        self._before = list(container)

    def changes(self) -> list[str]:
        is_same = len(self._container) == len(self._before) and all(
            map(_is_same, self._container, self._before)
        )
        return [] if is_same else [self.name]

    def restore(self) -> None:
        if self.changes():
            self._container.clear()
            add = self._container.update if isinstance(self._container, set) else self._container.extend
            add(self._before)


@final
class KeptNamespace(Kept):
    """Which objects a dict holds, or the attributes of an object, or variables; not what is in them.

    Args:
        name: Put before the keys; may be empty.
        namespace: The dict.
        keys: The only keys to look at; None for all.
        leave_out: Keys to leave as they are.
    """

    def __init__(
        self,
        name: str,
        namespace: dict[Any, Any],
        keys: Iterable[str] | None = None,
        leave_out: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name)
        self._namespace = namespace
        self._keys = None if keys is None else frozenset(keys)
        self._leave_out = leave_out
        self._before = self._items()

    def _items(self) -> dict[Any, Any]:
        keys = self._namespace if self._keys is None else self._keys & self._namespace.keys()
        return {key: self._namespace[key] for key in keys if key not in self._leave_out}

    def changes(self) -> list[str]:
        now, before = self._items(), self._before
        keys = [*before, *(key for key in now if key not in before)]
        changed = [key for key in keys if not _is_same(now.get(key, _ABSENT), before.get(key, _ABSENT))]
        return [f"{self.name}.{key}" if self.name else str(key) for key in changed]

    def restore(self) -> None:
        now = self._items()
        for key in now.keys() - self._before.keys():
            del self._namespace[key]
        for key, value in self._before.items():
            if key not in now or now[key] is not value:
                self._namespace[key] = value
        if list(self._items()) != list(self._before) and self._keys is None:
            for key in self._before:
                self._namespace[key] = self._namespace.pop(key)


_ABSENT = object()


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and isinstance(left, PLAIN) and left == right)


@final
class KeptCell(Kept):
    """What a variable of an enclosing function is bound to."""

    def __init__(self, name: str, cell: CellType) -> None:
        super().__init__(name)
        self._cell = cell
        self._before = cell.cell_contents

    def changes(self) -> list[str]:
        return [] if _is_same(self._cell.cell_contents, self._before) else [self.name]

    def restore(self) -> None:
        self._cell.cell_contents = self._before


@final
class KeptState(Kept):
    """Something that gives its state and takes it back, such as a random generator."""

    def __init__(self, name: str, give: Callable[[], Any], take: Callable[[Any], Any]) -> None:
        super().__init__(name)
        self._give = give
        self._take = take
        self._before = give()

    def again(self) -> "KeptState":
        """The same thing, as it is now."""
        return KeptState(self.name, self._give, self._take)

    def changes(self) -> list[str]:
        return [] if _bytes(self._give()) == _bytes(self._before) else [self.name]

    def restore(self) -> None:
        self._take(self._before)


def _bytes(state: Any) -> bytes:
    # A pickled tensor tells where it was, too.
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


@final
class KeptMode(Kept):
    """Whether a module trains."""

    def __init__(self, name: str, module: Module) -> None:
        super().__init__(name)
        self._module = module
        self._training = module.training

    def changes(self) -> list[str]:
        return [self.name] if self._module.training != self._training else []

    def restore(self) -> None:
        self._module.training = self._training


@final
class KeptRandomState(Kept):
    """The default random generators of torch (on the host and some devices), numpy and Python."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__("random state")
        self._torch = RandomState.capture(devices)
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def changes(self) -> list[str]:
        is_same = {
            "torch": RandomState.capture(self._torch.accelerators) == self._torch,
            "numpy": _bytes(np.random.get_state()) == _bytes(self._numpy),
            "Python": random.getstate() == self._python,
        }
        return [name for name, same in is_same.items() if not same]

    def restore(self) -> None:
        self._torch.restore()
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def kept_generator(name: str, value: Any) -> KeptState | None:
    """A random generator of the user's own, kept; None for anything else."""
    return KeptState(name, *state_access(value)) if is_generator(value) else None
