"""The options of a `torch.utils.data.DataLoader` that bear on memory, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final

import torch


@final
@dataclass(frozen=True)
class LoaderOptions:
    """Options of a loader, with the defaults of `DataLoader` itself.

    Attributes:
        num_workers: Processes that load; 0 loads in the process itself.
        pin_memory: Whether batches go into page-locked memory.
        prefetch_factor: Batches that each worker has ready; None where there are no workers.
        persistent_workers: Whether workers live on from epoch to epoch.
        worker_init_fn: What each worker runs first.
        generator: What the order of the rows and the workers' seeds are drawn from.
    """

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None

    def as_arguments(self) -> dict[str, Any]:
        """The arguments for `DataLoader`."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
