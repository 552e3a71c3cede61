"""Containers of every known kind, for tests that build, cut and join them."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class NamedList(list[Any]):
    """A list that carries an attribute."""

    name = ""


class SomeTuple(tuple[Any, ...]):
    """A tuple of a type of its own."""

    __slots__ = ()


class NamedDict(dict[str, Any]):
    """A dict that carries an attribute."""

    name = ""


class Namespace(dict[str, Any]):
    """A dict whose keys are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class ReadOnly(Mapping[str, Any]):
    """A mapping that can't be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class Sample:
    """A dataclass."""

    first: Any
    second: Any = None


@dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    """A frozen dataclass with slots and keyword-only fields."""

    first: Any
    second: Any = None


@dataclass
class Derived:
    """A dataclass with a field and an attribute that are worked out, and a property that is kept."""

    first: Any
    second: Any = field(init=False)

    def __post_init__(self) -> None:
        self.second = self.first * 2
        self.third = self.first * 3

    @cached_property
    def total(self) -> Any:
        return self.first.sum()


def as_default_dict(items: dict[str, Any]) -> defaultdict[str, Any]:
    """A defaultdict that makes lists."""
    return defaultdict(list, items)


def as_named_dict(items: dict[str, Any]) -> NamedDict:
    """A dict subclass with its attribute set."""
    new = NamedDict(items)
    new.name = "kept"
    return new


def as_named_list(elements: list[Any]) -> NamedList:
    """A list subclass with its attribute set."""
    new = NamedList(elements)
    new.name = "kept"
    return new


MAPPINGS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": as_default_dict,
    "dict subclass": as_named_dict,
    "namespace": Namespace,
    "read-only mapping": ReadOnly,
}
RECORDS = {
    "named tuple": Pair,
    "dataclass": Sample,
    "frozen dataclass": Frozen,
    "slotted dataclass": lambda first, second: Slotted(first=first, second=second),
}
LISTS = {
    "list": list,
    "tuple": tuple,
    "list subclass": as_named_list,
    "tuple subclass": SomeTuple,
}
