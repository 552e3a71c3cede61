"""What tensors and modules are called: their names in their model, or the variables that hold them."""

import itertools
from collections import Counter
from typing import Any


class Names:
    """Unique names by object. Objects are kept alive, so that no other takes a name over."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._whole: dict[int, str] = {}
        self._taken: set[str] = set()
        self._roots: list[str] = []
        self._shorts: Counter[str] = Counter()

    def add_root(self, name: str) -> None:
        """Says that names below this one are those of a model's parts: `model.fc.weight` is `fc.weight`."""
        self._roots.append(name)

    def add(self, value: Any, name: str) -> None:
        """Names an object by the whole way to it; its first name stays."""
        if value in self:
            return
        numbered = (f"{name}#{place}" for place in itertools.count(2))
        free = next(each for each in itertools.chain([name], numbered) if each not in self._taken)
        self._taken.add(free)
        self._objects[id(value)], self._whole[id(value)] = value, free
        self._shorts[self._short(free)] += 1

    def add_stand_in(self, value: Any, source: Any) -> None:
        """Names an object like the one that it stands for."""
        self._objects[id(value)], self._whole[id(value)] = value, self._whole[id(source)]

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._whole

    def of(self, value: Any) -> str:
        """The name of an object that has one."""
        return self.shown(self._whole[id(value)])

    def shown(self, name: str) -> str:
        """The short form of a whole name, where it means one object alone."""
        short = self._short(name)
        return short if self._shorts[short] <= 1 else name

    def _short(self, name: str) -> str:
        inside = [root for root in self._roots if name.startswith(f"{root}.")]
        return name[len(max(inside, key=len)) + 1 :] if inside else name
