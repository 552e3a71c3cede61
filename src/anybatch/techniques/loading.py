"""Loading beside training: workers, page-locked memory and prefetching, always as a legal set of options."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

from anybatch.errors import TechniqueError
from anybatch.memory.device import copies_asynchronously, is_accelerator
from anybatch.techniques.loader_options import LoaderOptions
from anybatch.techniques.technique import Setting, Technique
from anybatch.techniques.worker_seeds import SeededWorker

_MOST_WORKERS = 4


@final
@dataclass(frozen=True)
class Loading(Technique):
    """Loads in workers, and into page-locked memory where copies from there run beside the device's work.

    Both cost memory of the host; neither changes what the device holds. Workers live on from epoch to epoch,
    and generators that the dataset holds itself are seeded for each worker, which would otherwise draw alike.
    Rows keep their order: in the first epoch in any loader, later in a `SteadyLoader`.

    Error: exact. What a dataset draws at random differs with the number of workers, as it does in
    `torch.utils.data`.

    Source: `torch.utils.data`, "Multi-process data loading" and "Memory pinning".

    Attributes:
        workers: How many processes load; 0 loads in the process itself. `"auto"` takes one for each core but
            one, and 4 at most, where an accelerator computes and new processes are forked; elsewhere 0, as
            loading would take cores from training, or the program may not be written to be started again.
        pin_memory: `"auto"` pins where copies from there run beside the device's work (cuda and xpu).
        prefetch: Batches that each worker has ready, at least 1; None for torch's own 2.

    Raises:
        TechniqueError: An option is none of these, or batches are to be prefetched by no worker.

    >>> Loading(workers=2, prefetch=4).loading(LoaderOptions(), Setting(None)).prefetch_factor
    4
    """

    recommendation: ClassVar[int | None] = 7
    source: ClassVar[str] = "torch.utils.data, multi-process data loading and memory pinning"
    exactness: ClassVar[str] = "Exact: the same rows in the same order."

    workers: int | Literal["auto"] = "auto"
    pin_memory: bool | Literal["auto"] = "auto"
    prefetch: int | None = None

    def __post_init__(self) -> None:
        wrong = list(self._wrong())
        if wrong:
            raise TechniqueError(
                f'`Loading`: `workers` is "auto" or at least 0, `pin_memory` "auto", True or False, and '
                f"`prefetch` at least 1, with a worker that does it. Got {' and '.join(wrong)}. Write "
                f"Loading(workers=2), for example."
            )

    def _wrong(self) -> Iterator[str]:
        if self.workers != "auto" and not _is_whole(self.workers, 0):
            yield f"workers={self.workers!r}"
        if self.pin_memory != "auto" and not isinstance(self.pin_memory, bool):
            yield f"pin_memory={self.pin_memory!r}"
        if self.prefetch is not None and not _is_whole(self.prefetch, 1):
            yield f"prefetch={self.prefetch!r}"
        elif self.prefetch is not None and self.workers == 0:
            yield f"prefetch={self.prefetch!r} with workers=0"

    def check(self, setting: Setting) -> None:
        if self.pin_memory is True and not copies_asynchronously(setting.device):
            raise TechniqueError(
                f"`Loading`: page-locked memory helps where copies from it run beside the device's work. Got "
                f'pin_memory=True for {setting.device}, which does not do that. Leave it at "auto".'
            )
        if self.prefetch is not None and self._workers(setting) == 0:
            raise TechniqueError(
                f"`Loading`: only workers prefetch. Got prefetch={self.prefetch} and "
                f'workers="auto", which takes none for {setting.device} here. Say how many workers.'
            )

    def loading(self, options: LoaderOptions, setting: Setting) -> LoaderOptions:
        """A legal set of options: what only workers can do is asked of workers only.

        Raises:
            TechniqueError: As `check` does.
        """
        self.check(setting)
        workers = self._workers(setting)
        pins = copies_asynchronously(setting.device) if self.pin_memory == "auto" else self.pin_memory
        return replace(
            options,
            num_workers=workers,
            pin_memory=pins,
            prefetch_factor=self.prefetch,
            persistent_workers=workers > 0,
            worker_init_fn=SeededWorker(options.worker_init_fn) if workers else options.worker_init_fn,
        )

    def _workers(self, setting: Setting) -> int:
        if self.workers != "auto":
            return self.workers
        if not is_accelerator(setting.device) or not _forks():
            return 0
        return min(_cores() - 1, _MOST_WORKERS)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _forks() -> bool:
    """Are new processes copies of this one? Asked without settling it for the program."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return (chosen or multiprocessing.get_all_start_methods()[0]) == "fork"


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
