"""Put the outputs of the pieces together, in row order, without their graphs."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.batch.containers import container_of, map_tensors
from anybatch.batch.entries import possible_rows
from anybatch.batch.kinds import Container
from anybatch.batch.leaves import Array, is_array, is_strided
from anybatch.batch.slicers import slicer_of


def detach(output: Any, device: torch.device | None) -> Any:
    """Take one piece's outputs out of its graph and off its device, as soon as the piece is done.

    Args:
        output: Anything that the function returned.
        device: Where tensors go, at any depth; None leaves each where it is.

    Returns:
        The same in containers of the same type. No tensor keeps a graph, or more memory than its own, alive
        (rule 4), and none changes when a later piece writes into a buffer that was returned. An object that
        holds tensors in attributes (a cache, a distribution) is copied, its tensors settled.
    """
    return _Settler(device)(output)


class _Settler:
    """Settles the tensors of one output, in containers and in the attributes of objects."""

    def __init__(self, device: torch.device | None) -> None:
        self._change = partial(_settled, device=device)
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Any:
        return map_tensors(value, self._change, self._object)

    def _object(self, value: Any) -> Any:
        attributes = getattr(value, "__dict__", None)
        is_code = isinstance(value, (type, torch.nn.Module)) or callable(value)
        if not attributes or is_code or id(value) in self._open:
            return value
        self._open.add(id(value))
        settled = {name: self(child) for name, child in attributes.items()}
        self._open.remove(id(value))
        if all(settled[name] is child for name, child in attributes.items()):
            return value
        other = copy.copy(value)
        vars(other).update(settled)
        return other


def _settled(output: Tensor, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):  # in which jagged tensors can't be detached (torch 2.13)
        detached = output.detach()
        moved = detached if device is None else detached.to(device)
        has_left = moved.device != output.device
        is_fresh = has_left or (output.grad_fn is not None and not _is_part_of_more(output))
        return moved if is_fresh else moved.clone()


def _is_part_of_more(output: Tensor) -> bool:
    """Whether it keeps a storage alive that is larger than itself, or shared with what it is a view of."""
    return output._is_view() or not is_strided(output) or output.untyped_storage().nbytes() > output.nbytes


def join(outputs: Sequence[Any], rows: Sequence[int], device: torch.device | None) -> Any:
    """Put one output of all pieces together.

    Tensors and arrays with as many rows as their piece, in every piece, are concatenated along dim 0; 0-dim
    ones are stacked, one per piece; lists with one element per row are concatenated; so are jagged and
    sparse tensors, packed sequences, TensorDicts and batches of graphs that have their piece's rows;
    containers keep their structure; None in every piece stays None; anything else becomes a list with one
    entry per piece. One piece is joined by the same rules.

    Args:
        outputs: What each piece returned, in row order.
        rows: Rows of each piece.
        device: Where the joined tensors go; None leaves them where the first piece's are.

    Returns:
        The joined output, without graph.
    """
    if all(output is None for output in outputs):
        return None
    if any(slicer_of(output) is not None for output in outputs):
        return _join_cut_as_one([_placed(output, device) for output in outputs], rows)
    if all(map(is_array, outputs)):
        return _join_arrays([_placed(output, device) for output in outputs], rows)
    container = _common_container(outputs)
    if container is None:
        return [_placed(output, device) for output in outputs]
    if isinstance(outputs[0], list) and _is_per_row(outputs, rows):
        elements = [_placed(element, device) for output in outputs for element in output]
        return container.rebuild(outputs[0], elements)
    if not _have_same_keys(outputs, container):
        return [_placed(output, device) for output in outputs]
    return _join_children(outputs, rows, device, container)


def _placed(output: Any, device: torch.device | None) -> Any:
    def place(tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):  # as in `_settled`
            return tensor.detach() if device is None else tensor.detach().to(device)

    return map_tensors(output, place)


def _join_arrays(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    are_alike = len({(type(output), output.dtype, output.shape[1:]) for output in outputs}) == 1
    if not (are_alike and all(map(is_strided, outputs))):
        return list(outputs)
    if all(output.ndim == 0 for output in outputs):
        return _stack(outputs)
    return _concatenate(outputs) if all(map(_has_rows, outputs, rows)) else list(outputs)


def _join_cut_as_one(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    slicers = {slicer_of(output) for output in outputs}
    slicer = slicers.pop()
    have_rows = all(
        possible_rows(output, 0).rows == {count} for output, count in zip(outputs, rows, strict=True)
    )
    if slicer is None or slicers or slicer.join is None or not have_rows:
        return list(outputs)
    if len(outputs) == 1:
        return outputs[0]
    with torch.inference_mode(False), torch.no_grad():  # as in `_settled`
        return slicer.join(list(outputs))


def _has_rows(output: Array, rows: int) -> bool:
    return output.ndim > 0 and output.shape[0] == rows


def _stack(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], np.ndarray):
        return np.stack(outputs)
    return torch.stack([output.to(outputs[0].device) for output in outputs])


def _concatenate(outputs: Sequence[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], np.ndarray):
        return np.concatenate(outputs)
    return torch.cat([output.to(outputs[0].device) for output in outputs])


def _common_container(outputs: Sequence[Any]) -> Container | None:
    kinds = set(map(type, outputs))
    return container_of(outputs[0]) if len(kinds) == 1 else None


def _keys(output: Any, container: Container) -> list[Any]:
    return [key for key, _ in container.children(output)]


def _have_same_keys(outputs: Sequence[Any], container: Container) -> bool:
    first = _keys(outputs[0], container)
    return all(_keys(output, container) == first for output in outputs[1:])


def _join_children(
    outputs: Sequence[Any], rows: Sequence[int], device: torch.device | None, container: Container
) -> Any:
    children = ([child for _, child in container.children(output)] for output in outputs)
    joined = [join(of_one_key, rows, device) for of_one_key in zip(*children, strict=True)]
    return container.rebuild(outputs[0], joined)


def _is_per_row(outputs: Sequence[list[Any]], rows: Sequence[int]) -> bool:
    """Whether lists hold one element per row: the length says so, and they are no containers of row tensors.

    Where all pieces have the same size, a list of 0-dim tensors of that length could be either; it is a
    container, as a list of any other length would be.
    """
    if any(len(output) != count for output, count in zip(outputs, rows, strict=True)):
        return False
    tensors = [
        (array, count) for output, count in zip(outputs, rows, strict=True) for array in _arrays(output)
    ]
    if not tensors:
        return True
    if all(array.ndim == 0 for array, _ in tensors):
        return len(set(rows)) > 1
    return not all(_has_rows(array, count) for array, count in tensors)


def _arrays(output: Any) -> list[Array]:
    if is_array(output):
        return [output]
    container = container_of(output)
    if container is None:
        return []
    return [array for _, child in container.children(output) for array in _arrays(child)]
