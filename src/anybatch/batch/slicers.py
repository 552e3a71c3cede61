"""The kinds that are cut as one: tensors that are no dense block, containers whose parts are tied."""

from typing import Any

import torch
from torch import Tensor

from anybatch.batch.containers import container_of
from anybatch.batch.kinds import Slicer
from anybatch.batch.ragged import JAGGED, is_jagged
from anybatch.batch.sparse import SPARSE


def slicer_of(value: Any) -> Slicer | None:
    """How rows are taken from `value` as one; None where it is cut otherwise, or not at all."""
    if isinstance(value, Tensor):
        return _slicer_of_tensor(value)
    container = container_of(value)
    return None if container is None else container.slicer


def _slicer_of_tensor(value: Tensor) -> Slicer | None:
    if is_jagged(value):
        return JAGGED
    return SPARSE if value.layout is torch.sparse_coo else None
