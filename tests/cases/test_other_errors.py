"""A bug comes through at once; what never fits ends with the memory error, and no size of 0.

huggingface/accelerate#335, d8ahazard/sd_dreambooth_extension#1282, facebookresearch/metaseq#304,
ludwig-ai/ludwig#2034.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anybatch
from anybatch.errors import DoesNotFitError, InexactWarning
from anybatch.fit.auto import Auto

BUGS: list[Exception] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    KeyError("out of memory"),
    ValueError("memory bank out of range"),
]


def failing(error: Exception, most_rows: int) -> tuple[Callable[..., Tensor], list[int]]:
    """A function that raises with more than so many rows, and the sizes that it was tried with."""
    weight, sizes = torch.ones((), requires_grad=True), []

    def function(x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not a symbolic run
            sizes.append(len(x))
        if len(x) > most_rows:
            raise error
        return (weight * x).mean()

    return anybatch.apply(["x"], ub_size=Auto(prefer="largest"))(function), sizes


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_surfaces_at_once(bug: Exception) -> None:
    """Another error is raised as it is, the same object, with the whole mini-batch tried and nothing else."""
    call, sizes = failing(bug, 0)
    with pytest.raises(type(bug)) as caught:
        call(x=torch.randn(32))
    assert caught.value is bug
    assert set(sizes) <= {2, 32}  # a look at two rows, and the call
    assert sizes.count(32) <= 1


def test_what_never_fits_says_so() -> None:
    """It is tried down to one row and no more often than need be; the memory's error is the cause."""
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. (simulated)")
    call, sizes = failing(out_of_memory, 0)
    with pytest.raises(DoesNotFitError) as caught:
        call(x=torch.randn(32))
    assert caught.value.__cause__ is out_of_memory
    assert caught.value.rows == 1
    assert min(sizes) == 1
    assert sizes.count(32) == 1
    assert len(sizes) <= 32


@pytest.mark.parametrize("most_rows", [1, 3, 11, 31])
def test_size_that_is_found_never_exceeds_what_fits(most_rows: int) -> None:
    """The rows of the pieces that went through are at most those that fit, and at least one."""
    call, sizes = failing(torch.OutOfMemoryError("CUDA out of memory. (simulated)"), most_rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactWarning)
        call(x=torch.randn(32))
    done: list[int] = []
    while sum(done) < 32:
        done.append(sizes[len(sizes) - 1 - len(done)])
    assert sum(done) == 32
    assert 1 <= max(done) <= most_rows
