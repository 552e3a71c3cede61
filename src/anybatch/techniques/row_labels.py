"""The label of each row of a dataset, wherever the dataset keeps it."""

from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from anybatch.errors import TechniqueError


def row_labels(dataset: Sized, where: str | int) -> NDArray[np.int64]:
    """The class of each row, as a number from 0 on.

    Read from what the dataset holds as a whole where that is known: an attribute, a column, a tensor.
    Otherwise every row is loaded once.

    Args:
        dataset: With rows by number.
        where: The name of an attribute or of an entry of each row; or the place of the label in each row.

    Raises:
        TechniqueError: There are no such labels, or not one for each row.
    """
    labels = _as_array(_values(dataset, where))
    if labels.shape != (len(dataset),) or labels.dtype == object:
        raise TechniqueError(
            f"`Sampling`: `stratify` finds one label for each row, a number or a text. Got {where!r}, which "
            f"is {_described(labels)}, for {len(dataset)} rows. Name one label, or leave `stratify` out."
        )
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _values(dataset: Any, where: str | int) -> Any:
    if isinstance(dataset, Subset):
        return _of_subset(dataset, where)
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([np.asarray(_values(each, where)) for each in dataset.datasets])
    known = _of_all(dataset, where)
    return _of_rows(dataset, where) if known is None else _on_host(known)


def _of_subset(dataset: Subset[Any], where: str | int) -> Any:
    inner = dataset.dataset
    known = _of_all(inner, where)
    if known is None and not isinstance(inner, (Subset, ConcatDataset)):
        return _of_rows(dataset, where)  # only those rows are loaded
    values = np.asarray(_values(inner, where))
    return values[np.asarray(dataset.indices, dtype=np.int64)]


def _of_all(dataset: Any, where: str | int) -> Any:
    """What the dataset holds for all rows together; None where it does not."""
    if isinstance(where, int):
        is_held = isinstance(dataset, TensorDataset) and where < len(dataset.tensors)
        return dataset.tensors[where] if is_held else None
    if where in (getattr(dataset, "column_names", None) or ()):
        return dataset[where][:]
    return getattr(dataset, where, None)


def _of_rows(dataset: Any, where: str | int) -> list[Any]:
    return [_on_host(_entry(dataset, row, where)) for row in range(len(dataset))]


def _entry(dataset: Any, row: int, where: str | int) -> Any:
    try:
        return dataset[row][where]
    except (KeyError, IndexError, TypeError) as error:
        raise TechniqueError(
            f"`Sampling`: `stratify` names an attribute of the dataset or an entry of each row. Got "
            f"{where!r}; a {type(dataset).__name__} has none, and neither has its row {row}. Name another."
        ) from error


def _as_array(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # of several lengths
        return np.asarray(None)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _described(labels: NDArray[Any]) -> str:
    if labels.dtype == object:
        return "made of objects"
    return f"{labels.dtype} of shape {labels.shape}"
