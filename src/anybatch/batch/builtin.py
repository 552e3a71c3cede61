"""The containers known from the start: mappings, lists, tuples, named tuples, dataclasses, and mixtures.

A rebuilt container keeps its type and whatever else it carries (a default factory, attributes of a subclass).
It is copied, never constructed: `__init__` and `__post_init__` may compute something that holds only once.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Pairs = list[tuple[Any, Any]]
Kind = tuple[Callable[[Any], Pairs], Callable[[Any, list[Any]], Any], bool]


def built_in(kind: type) -> Kind | None:
    """`(children, rebuild, is_list)` for a class known from the start, None for any other."""
    if issubclass(kind, torch.Size | PackedSequence):
        return None
    if _is_batch_encoding(kind):
        return _encoding_items, _rebuild_encoding, False
    if issubclass(kind, Mapping):
        return _items, _rebuild_mapping, False
    if dataclasses.is_dataclass(kind):
        return _attributes, _rebuild_dataclass, False
    if issubclass(kind, tuple):
        return _built_in_tuple(kind)
    if issubclass(kind, list):
        return _elements, _rebuild_list, True
    return None


def _built_in_tuple(kind: type[tuple[Any, ...]]) -> Kind:
    if hasattr(kind, "_fields"):
        return _named_elements, _rebuild_named_tuple, False
    is_struct_sequence = hasattr(kind, "n_sequence_fields")  # what torch.max and its like return
    return _elements, _rebuild_tuple, not is_struct_sequence


def _elements(value: Any) -> Pairs:
    return list(enumerate(value))


def _rebuild_list(value: list[Any], children: list[Any]) -> list[Any]:
    if type(value) is list:
        return children
    new = copy.copy(value)
    new[:] = children
    return new


def _rebuild_tuple(value: tuple[Any, ...], children: list[Any]) -> tuple[Any, ...]:
    return type(value)(children)


def _named_elements(value: Any) -> Pairs:
    return list(zip(value._fields, value, strict=True))


def _rebuild_named_tuple(value: Any, children: list[Any]) -> Any:
    return value._make(children)


def _items(value: Mapping[Any, Any]) -> Pairs:
    return list(value.items())


def _rebuild_mapping(value: Mapping[Any, Any], children: list[Any]) -> Mapping[Any, Any]:
    items = dict(zip(value.keys(), children, strict=True))
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping) or _is_its_own_namespace(value):
        construct: Callable[[dict[Any, Any]], Mapping[Any, Any]] = type(value)
        return construct(items)
    new = copy.copy(value)
    _replace_items(new, items)
    _replace_attributes(new, list(value.values()), children)
    return new


def _is_its_own_namespace(value: Any) -> bool:
    """Whether keys are attributes too, by `self.__dict__ = self`; a copy would tear the two apart."""
    return getattr(value, "__dict__", None) is value


def _replace_items(new: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    if not isinstance(new, dict):
        new.update(items)
        return
    # The keys are already what a subclass's own __setitem__ made of them, so it must not see them again.
    base = OrderedDict if isinstance(new, OrderedDict) else dict
    base.clear(new)
    for key, child in items.items():
        base.__setitem__(new, key, child)


def _replace_attributes(new: Any, old: list[Any], children: list[Any]) -> None:
    """Attributes that are one of the items (ModelOutput's fields) follow it."""
    changed = {id(before): after for before, after in zip(old, children, strict=True) if before is not after}
    namespace = getattr(new, "__dict__", {})
    for name, attribute in list(namespace.items()):
        if id(attribute) in changed:
            namespace[name] = changed[id(attribute)]


def _attributes(value: Any) -> Pairs:
    """Fields and further attributes; a cached property is no attribute, it is computed again."""
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    further = [name for name in getattr(value, "__dict__", {}) if name not in fields]
    kept = [name for name in (*fields, *further) if not _is_cached(value, name)]
    return [(name, getattr(value, name)) for name in kept]


def _rebuild_dataclass(value: Any, children: list[Any]) -> Any:
    new = copy.copy(value)
    for (name, _), child in zip(_attributes(value), children, strict=True):
        object.__setattr__(new, name, child)  # also where the dataclass is frozen
    for name in [name for name in getattr(new, "__dict__", {}) if _is_cached(new, name)]:
        del new.__dict__[name]
    return new


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), cached_property)


def _is_batch_encoding(kind: type) -> bool:
    """Whether it is what a tokenizer of transformers returns; recognised by name, so nothing is imported."""
    return any(
        base.__name__ == "BatchEncoding" and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


def _encoding_items(value: Any) -> Pairs:
    # The fast tokenizers' own view of each row stands beside the items, and has to stay with its row.
    return [*value.data.items(), ("encodings", value._encodings)]


def _rebuild_encoding(value: Any, children: list[Any]) -> Any:
    *items, encodings = children
    new = copy.copy(value)
    new.data = dict(zip(value.data, items, strict=True))
    new._encodings = encodings
    return new
