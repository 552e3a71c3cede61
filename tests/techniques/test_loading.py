"""Options of loaders: legal, and with the same rows in the same order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.techniques.training import assert_close, two_steps
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from anybatch.errors import TechniqueError
from anybatch.techniques import LoaderOptions, Loading, Setting, SteadyLoader
from anybatch.techniques.worker_seeds import own_generators, seed_generator

CPU, CUDA, MPS, XPU = (
    Setting(nn.Identity(), None, torch.device(kind)) for kind in ("cpu", "cuda", "mps", "xpu")
)


@pytest.fixture(autouse=True)
def _four_cores_that_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")


def options(setting: Setting, **chosen: Any) -> LoaderOptions:
    return Loading(**chosen).loading(LoaderOptions(), setting)


@pytest.mark.parametrize("setting", [CPU, CUDA, MPS, XPU])
def test_every_set_of_options_is_one_that_a_loader_takes(setting: Setting) -> None:
    """Whatever is chosen, a loader can be made of it without an error or a warning, or it is refused."""
    made = 0
    for workers, pin, prefetch in itertools.product(("auto", 0, 1, 3), ("auto", False, True), (None, 1, 4)):
        try:
            chosen = options(setting, workers=workers, pin_memory=pin, prefetch=prefetch)
        except TechniqueError:
            continue
        DataLoader([1, 2], **chosen.as_arguments())  # type: ignore[arg-type]
        made += 1
    assert made >= 16


def test_loading_beside_an_accelerator_takes_workers() -> None:
    """One core is left to training, and workers live on."""
    chosen = options(CUDA)
    assert (chosen.num_workers, chosen.persistent_workers, chosen.prefetch_factor) == (3, True, None)


def test_not_more_than_four_workers_are_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs memory of the host."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert options(CUDA).num_workers == 4


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_that_is_started_again_gets_no_workers_unasked(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a new process runs the program again, workers are taken only where they are asked for."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: method)
    assert options(CUDA).num_workers == 0
    assert options(CUDA, workers=2).num_workers == 2


def test_loading_on_the_host_takes_no_cores_from_training() -> None:
    """On a CPU nothing is prefetched or pinned unasked."""
    assert options(CPU) == LoaderOptions()


def test_only_where_copies_overlap_memory_is_pinned() -> None:
    """cuda and xpu copy from page-locked memory beside their work; mps and the host do not."""
    pins = [options(setting).pin_memory for setting in (CPU, CUDA, MPS, XPU)]
    assert pins == [False, True, False, True]


@pytest.mark.parametrize("setting", [CPU, MPS])
def test_pinning_that_does_not_help_is_refused(setting: Setting) -> None:
    """What is asked for and can't help is said (Rule 8)."""
    with pytest.raises(TechniqueError, match=f"pin_memory=True for {setting.device}"):
        Loading(pin_memory=True).check(setting)


def test_prefetching_without_workers_is_refused() -> None:
    """Batches that no worker can have ready are said."""
    with pytest.raises(TechniqueError, match='prefetch=4 and workers="auto", which takes none for cpu'):
        options(CPU, prefetch=4)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_rows_keep_their_order_in_every_epoch(workers: int) -> None:
    """Three epochs of a steady loader give the order of a plain one, and leave its generator where it was."""
    dataset = TensorDataset(torch.arange(20))

    def epochs(make: Any, generator: torch.Generator, chosen: dict[str, Any]) -> list[list[int]]:
        loader = make(dataset, batch_size=3, shuffle=True, generator=generator, **chosen)
        return [torch.cat([batch[0] for batch in loader]).tolist() for _ in range(3)]

    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    chosen = options(CPU, workers=workers).as_arguments() | {
        "multiprocessing_context": "fork" if workers else None
    }
    chosen.pop("generator")
    plain = epochs(DataLoader, generators[0], {})
    steady = epochs(SteadyLoader, generators[1], chosen)
    assert plain == steady
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


class Augmented(Dataset[list[float]]):
    """Draws from generators of its own for each row."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(0)
        self.parts = {"numpy": [np.random.default_rng(0)], "old": np.random.RandomState(0)}
        self.transform = SimpleNamespace(python=random.Random(0), other=random.Random(0))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> list[float]:
        return [
            float(torch.rand((), generator=self.torch)),
            self.parts["numpy"][0].random(),  # type: ignore[index]
            self.parts["old"].random(),  # type: ignore[union-attr]
            self.transform.python.random(),
            self.transform.other.random(),
        ]


def note_worker(worker: int) -> None:
    """A worker's own beginning: it moves a generator, so that the draws tell that it ran."""
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.dataset.transform.python = SimpleNamespace(random=lambda: 10.0 + worker)


def drawn(init: Any = None) -> list[list[float]]:
    chosen = Loading(workers=2).loading(LoaderOptions(worker_init_fn=init), CPU).as_arguments()
    chosen["generator"] = torch.Generator().manual_seed(3)
    loader = SteadyLoader(
        Subset(Augmented(), range(4)), batch_size=None, multiprocessing_context="fork", **chosen
    )
    return [list(row) for row in loader]


def test_workers_draw_differently_and_the_same_again() -> None:
    """Generators of the dataset differ from worker to worker; the same seed of the loader repeats them."""
    first = drawn()
    assert first == drawn()
    for at in range(5):
        assert len({row[at] for row in first}) == 4
    assert all(row[3] != row[4] for row in first)  # two of one kind differ, too


def test_the_callers_own_beginning_of_a_worker_still_runs() -> None:
    """What workers ran first before, they run after their generators are seeded."""
    assert [row[3] for row in drawn(note_worker)] == [10.0, 11.0, 10.0, 11.0]


def test_each_generator_is_found_once() -> None:
    """Generators that several things hold are seen once; tensors and large lists are passed by."""
    dataset = Augmented()
    dataset.again = [dataset, dataset.torch, torch.ones(2)]  # type: ignore[attr-defined]
    dataset.rows = [random.Random(0)] * 1000  # type: ignore[attr-defined]
    assert len(own_generators(dataset)) == 5


@pytest.mark.parametrize(
    "make", [torch.Generator, np.random.default_rng, np.random.RandomState, random.Random]
)
def test_a_seed_says_where_a_generator_is(make: Any) -> None:
    """After the same seed a generator draws the same, after another one something else."""

    def draw(entropy: list[int]) -> float:
        generator = make()
        seed_generator(generator, entropy)
        is_torch = isinstance(generator, torch.Generator)
        return float(torch.rand((), generator=generator)) if is_torch else generator.random()

    assert draw([1, 2, 0]) == draw([1, 2, 0]) != draw([1, 2, 1])


@pytest.mark.parametrize("ub_size", [None, 1, 4, 5])
def test_steps_on_batches_from_workers_are_those_of_plain_loading(ub_size: int | None) -> None:
    """Two steps of AdamW on a batch from a worker are those on the batch of a plain loader."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))
    chosen = options(CPU, workers=1).as_arguments() | {"multiprocessing_context": "fork"}
    found = []
    for loader, size in (
        (DataLoader(dataset, 9, shuffle=True, generator=torch.Generator().manual_seed(1)), None),
        (
            SteadyLoader(
                dataset, 9, shuffle=True, **chosen | {"generator": torch.Generator().manual_seed(1)}
            ),
            ub_size,
        ),
    ):
        torch.manual_seed(2)
        (batch,) = loader
        found.append(two_steps(nn.Linear(4, 1).double(), *batch, ub_size=size))
    for expected, got in zip(*found, strict=True):
        assert_close(expected, got)
