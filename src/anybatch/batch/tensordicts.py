"""TensorDicts and tensorclasses, whose `batch_size` says where their rows are; tensordict is not imported."""

from typing import Any

import torch
from torch import Tensor

from anybatch.batch.kinds import CannotCut, Container, Slicer


def is_tensordict(kind: type) -> bool:
    """Whether it is a class of TensorDicts, or one made by `tensorclass`."""
    is_collection = any(
        (base.__module__, base.__name__) == ("tensordict._tensorcollection", "TensorCollection")
        for base in kind.__mro__
    )
    return is_collection or bool(kind.__dict__.get("_is_tensorclass"))


def _children(value: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []

    def note(name: Any, tensor: Tensor) -> Tensor:
        found.append((name if isinstance(name, str) else ".".join(name), tensor))
        return tensor

    value.named_apply(note, nested_keys=True, filter_empty=False)
    return found


def _rebuild(value: Any, children: list[Tensor]) -> Any:
    left = iter(children)
    # It would claim its old device for tensors that have moved.
    device = None if value.device is None else children[0].device if children else value.device
    return value.named_apply(
        lambda _name, _old: next(left), nested_keys=True, filter_empty=False, device=device
    )


def _rows(value: Any, dim: int) -> int:
    sizes = value.batch_size
    if not -len(sizes) <= dim < len(sizes):
        raise CannotCut(
            f"has no batch dim {dim}: its batch size is {tuple(sizes)}. Set its `batch_size`, or declare "
            "with `batch_dim` where its rows are."
        )
    return int(sizes[dim])


def _cut(value: Any, dim: int, start: int, stop: int) -> Any:
    return value[(slice(None),) * (dim % len(value.batch_size)) + (slice(start, stop),)]


def _join(values: list[Any]) -> Any:
    return torch.cat(values)


CONTAINER = Container(_children, _rebuild, slicer=Slicer(_rows, _cut, join=_join))
