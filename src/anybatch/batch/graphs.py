"""Graphs of PyTorch Geometric, cut from a `Batch` by its own means, which number a piece's nodes from 0.

The library is not imported; its classes are recognised by name.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from anybatch.batch.kinds import CannotCut, Container, Slicer

_GRAPH = ("torch_geometric.data.data", "BaseData")
_BATCH = ("torch_geometric.data.batch", "Batch")


def is_graph(kind: type) -> bool:
    """Whether it is a class of graphs, single or batched, homogeneous or not."""
    return _base(kind, _GRAPH) is not None


def _base(kind: type, name: tuple[str, str]) -> Any:
    return next((base for base in kind.__mro__ if (base.__module__, base.__qualname__) == name), None)


def _children(value: Any) -> list[tuple[str, Any]]:
    return [(_path(store, key), child) for store in value.stores for key, child in store.items()]


def _path(store: Any, key: str) -> str:
    kind = store._key
    if kind is None:
        return key
    return f"{kind if isinstance(kind, str) else '__'.join(kind)}.{key}"


def _rebuild(value: Any, children: list[Any]) -> Any:
    new, left = copy.copy(value), iter(children)
    for store in new.stores:
        for key in list(store.keys()):
            store[key] = next(left)
    return new


def _rows(value: Any, _dim: int) -> int:
    if _base(type(value), _BATCH) is None:
        raise CannotCut(
            "is one graph, no batch of graphs. Give `Batch.from_data_list([...])`, or a list of graphs."
        )
    if not hasattr(value, "_slice_dict"):
        raise CannotCut("does not know where its graphs begin. Make it with `Batch.from_data_list`.")
    late = [
        _path(store, key) for store, key, child in _late(value) if isinstance(child, Tensor) and child.ndim
    ]
    if late:
        raise CannotCut(
            f"was given {', '.join(late)} after its graphs were put together, so which graph has what of it "
            "is not known. Set it on each graph before, or pass it beside the batch."
        )
    rows: int = value.num_graphs
    return rows


def _late(value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Attributes that were set after the graphs were put together."""
    for store in value.stores:
        known = _slices(value, store)
        own = {
            "batch",
            "ptr",
            "num_nodes",
            *known,
            *(f"{key}_{end}" for key in known for end in ("batch", "ptr")),
        }
        yield from ((store, key, child) for key, child in store.items() if key not in own)


def _slices(value: Any, store: Any) -> Mapping[str, Any]:
    slices: Mapping[Any, Any] = value._slice_dict
    return slices if store._key is None else slices.get(store._key, {})


def _cut(value: Any, _dim: int, start: int, stop: int) -> Any:
    followed = {key for store in value.stores for key in _slices(value, store) if f"{key}_batch" in store}
    graphs = value.index_select(slice(start, stop))
    piece = _base(type(value), _BATCH).from_data_list(graphs, follow_batch=sorted(followed))
    stores = {store._key: store for store in piece.stores}
    for store, key, child in _late(value):
        stores[store._key][key] = child
    return piece


def _nodes(value: Any) -> list[int]:
    """The nodes of each graph, of all types together."""
    counts = [store["ptr"].diff() for store in value.node_stores if "ptr" in store]
    if not counts:
        raise CannotCut("does not know how many nodes each graph has. Set `num_nodes` on each graph.")
    nodes: list[int] = sum(counts[1:], counts[0]).tolist()
    return nodes


def _join(values: list[Any]) -> Any:
    graphs = [graph for value in values for graph in value.to_data_list()]
    return _base(type(values[0]), _BATCH).from_data_list(graphs)


CONTAINER = Container(_children, _rebuild, slicer=Slicer(_rows, _cut, _nodes, _join))
