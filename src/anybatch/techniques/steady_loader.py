"""A loader whose rows come in the same order with workers that live on as without workers."""

from typing import Any, final

import torch
from torch.utils.data import DataLoader


@final
class SteadyLoader(DataLoader[Any]):
    """A `DataLoader` in which `persistent_workers` does not change the order of later epochs.

    A loader draws a seed for its workers at the beginning of each epoch, and then the order, from one
    generator. With persistent workers it draws that seed in the first epoch only (torch 2.13), and so gives
    another order from the second epoch on. Here the seed is drawn, and not used.
    """

    def __iter__(self) -> Any:
        has_workers_from_before = self.persistent_workers and self._iterator is not None
        if has_workers_from_before:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super().__iter__()
