"""The containers known from the start: mappings, lists, tuples, named tuples, dataclasses, and mixtures.

Kinds of other libraries are recognised by the names of their classes, so nothing is imported.

A rebuilt container keeps its type and whatever else it carries (a default factory, attributes of a subclass).
It is copied, never constructed: `__init__` and `__post_init__` may compute something that holds only once.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch import graphs, packed, tensordicts
from anybatch.batch.kinds import Container

Pairs = list[tuple[Any, Any]]


def built_in(kind: type) -> Container | None:
    """How to open a class known from the start, None for any other."""
    if issubclass(kind, torch.Size):
        return None
    if issubclass(kind, PackedSequence):
        return packed.CONTAINER
    foreign = _built_in_foreign(kind)
    if foreign is not None:
        return foreign
    if issubclass(kind, Mapping):
        return Container(_items, _rebuild_mapping)
    if dataclasses.is_dataclass(kind):
        return Container(_attributes, _rebuild_record)
    if issubclass(kind, tuple):
        return _built_in_tuple(kind)
    if issubclass(kind, list):
        return Container(_elements, _rebuild_list, is_list=True)
    return Container(_attributes, _rebuild_record, is_object=True) if _is_batch_object(kind) else None


def _built_in_foreign(kind: type) -> Container | None:
    """The kinds of other libraries."""
    if _is_batch_encoding(kind):
        return Container(_encoding_items, _rebuild_encoding)
    if tensordicts.is_tensordict(kind):
        return tensordicts.CONTAINER
    return graphs.CONTAINER if graphs.is_graph(kind) else None


def _built_in_tuple(kind: type[tuple[Any, ...]]) -> Container:
    if hasattr(kind, "_fields"):
        return Container(_named_elements, _rebuild_named_tuple)
    is_struct_sequence = hasattr(kind, "n_sequence_fields")  # what torch.max and its like return
    return Container(_elements, _rebuild_tuple, is_list=not is_struct_sequence)


def _is_batch_object(kind: type) -> bool:
    """Whether its objects are namespaces, or can be sent to a device and are neither module nor function."""
    if issubclass(kind, SimpleNamespace):
        return True
    is_other = issubclass(kind, torch.Tensor | Module) or any(
        "__call__" in vars(base) for base in kind.__mro__
    )
    return callable(getattr(kind, "to", None)) and not is_other


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
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    fields = [field.name for field in declared if hasattr(value, field.name)]
    further = [name for name in getattr(value, "__dict__", {}) if name not in fields]
    kept = [name for name in (*fields, *further) if not _is_cached(value, name)]
    return [(name, getattr(value, name)) for name in kept]


def _rebuild_record(value: Any, children: list[Any]) -> Any:
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
