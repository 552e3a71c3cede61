"""Which errors mean that the memory ran out."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from anybatch.fit.guard import MemoryVerdict, is_out_of_memory, memory_verdict

YES, MAYBE, NO = MemoryVerdict.YES, MemoryVerdict.MAYBE, MemoryVerdict.NO


class CustomError(Exception):
    """An error of a user's own, of no built-in kind."""


class WorkerError(RuntimeError):
    """A RuntimeError of somebody else's."""


def raised_by(call: Callable[[], object]) -> BaseException:
    """The error that a call really raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


CASES: list[tuple[BaseException, MemoryVerdict]] = [
    # Real ones.
    (raised_by(lambda: torch.empty(10**15)), YES),
    (raised_by(lambda: np.empty(10**15)), YES),
    (raised_by(lambda: torch.ones(2, 3) @ torch.ones(4, 5)), NO),
    (raised_by(lambda: torch.empty(-1)), NO),
    (raised_by(lambda: torch.empty(2**62)), NO),
    # By class.
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), YES),
    (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 15.62 GiB."), YES),
    (torch.OutOfMemoryError(), YES),
    (MemoryError(), YES),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), YES),
    (OSError(errno.ENOSPC, "No space left on device"), NO),
    # The host's allocators.
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"), YES),
    (RuntimeError("std::bad_alloc"), YES),
    (RuntimeError("Cannot allocate memory"), YES),
    (RuntimeError("Unable to allocate 7.11 PiB for an array with shape (1000000000000000,)"), YES),
    # CUDA, HIP and their libraries.
    (torch.AcceleratorError("CUDA error: out of memory"), YES),
    (torch.AcceleratorError("HIP error: out of memory"), YES),
    (RuntimeError("CUDA driver error: out of memory"), YES),
    (RuntimeError("cudaErrorMemoryAllocation: out of memory"), YES),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), YES),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), YES),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), YES),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), YES),
    (RuntimeError("NCCL Error 1: unhandled cuda error, Cuda failure 2 'out of memory'"), YES),
    (WorkerError("Caught OutOfMemoryError in replica 0 on device 0.\nCUDA out of memory."), YES),
    # Metal and Level Zero.
    (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB, max allowed: 6 GB)."), YES),
    (RuntimeError("Invalid buffer size: 50.62 GiB"), YES),
    (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), YES),
    (RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"), YES),
    # Often, but not always, a lack of memory.
    (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. You passed in a non-contiguous input."), MAYBE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), MAYBE),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), MAYBE),
    (RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"), MAYBE),
    (RuntimeError("GET was unable to find an engine to execute this computation"), MAYBE),
    (RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"), MAYBE),
    (RuntimeError("could not create a primitive"), MAYBE),
    # Not a lack of memory, though some sound like it.
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), NO),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), NO),
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), NO),
    (RuntimeError("CUDA error: no kernel image is available"), NO),
    (RuntimeError("the offset is out of memory bounds"), NO),
    (RuntimeError("invalid argument: the buffer size: 3 is odd"), NO),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), NO),
    (ValueError("memory bank out of range"), NO),
    (ValueError("out of memory"), NO),
    (KeyError("out of memory"), NO),
    (CustomError("CUDA out of memory"), NO),
    (RuntimeError(), NO),
    (KeyboardInterrupt(), NO),
    (SystemExit(1), NO),
]


@pytest.mark.parametrize(("error", "verdict"), CASES, ids=lambda value: str(value)[:40])
def test_verdict_of_one_error(error: BaseException, verdict: MemoryVerdict) -> None:
    """Each error gets its verdict by class first and by wording second; only a sure one counts."""
    assert memory_verdict(error) is verdict
    assert is_out_of_memory(error) is (verdict is YES)


@pytest.mark.parametrize(("error", "verdict"), CASES, ids=lambda value: str(value)[:40])
def test_verdict_looks_through_wrapping(error: BaseException, verdict: MemoryVerdict) -> None:
    """An error raised from another, at any depth or in a group, has the verdict of what it wraps."""
    inner = CustomError("step failed")
    inner.__cause__ = error
    outer = ValueError("training failed")
    outer.__cause__ = inner
    assert memory_verdict(outer) is verdict
    assert memory_verdict(BaseExceptionGroup("workers", [KeyError("x"), error])) is verdict
    assert memory_verdict(BaseExceptionGroup("all", [BaseExceptionGroup("node", [outer])])) is verdict


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(1)])
def test_interruption_outweighs_out_of_memory(interruption: BaseException) -> None:
    """A group that also holds an interruption is not out-of-memory: nobody wants it tried again."""
    group = BaseExceptionGroup("workers", [MemoryError(), interruption])
    assert memory_verdict(group) is NO
    interruption.__cause__ = MemoryError()
    assert memory_verdict(interruption) is NO


def test_sure_outweighs_unsure() -> None:
    """A sure member decides, wherever it stands among unsure and other ones."""
    unsure = RuntimeError("could not create a primitive")
    assert memory_verdict(ExceptionGroup("workers", [unsure, MemoryError(), KeyError("x")])) is YES
    assert memory_verdict(ExceptionGroup("workers", [KeyError("x"), unsure])) is MAYBE


def test_error_while_handling_out_of_memory_is_its_own() -> None:
    """A bug in the code that handles an out-of-memory is a bug: the implicit context does not count."""
    bug = KeyError("x")
    bug.__context__ = MemoryError()
    assert memory_verdict(bug) is NO


def test_circular_causes_end() -> None:
    """Two errors that name each other as cause are looked at once each."""
    first, second = KeyError("x"), CustomError()
    first.__cause__, second.__cause__ = second, first
    assert memory_verdict(first) is NO


LIMITED_PROCESS = """
import resource, torch
from anybatch.fit.guard import is_out_of_memory
torch.set_num_threads(1)
held = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")][0]
resource.setrlimit(resource.RLIMIT_DATA, ((held << 10) + (64 << 20), resource.RLIM_INFINITY))
tensors = []
try:
    while True:
        tensors.append(torch.ones(1 << 20))
except Exception as error:
    count = len(tensors)
    del tensors
    print(count, is_out_of_memory(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory in RLIMIT_DATA")
def test_operating_systems_limit_is_recognised() -> None:
    """The error of a process that really reaches its limit is recognised: 64 MiB hold at most 16 of 4 MiB."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED_PROCESS], capture_output=True, text=True, check=True
    )
    count, verdict = result.stdout.split()
    assert verdict == "True"
    assert 1 <= int(count) <= 16


CONVOLUTION_IN_LITTLE_MEMORY = """
import sys, torch
from anybatch.fit.guard import memory_verdict
from anybatch.memory.limit import limit_growth
torch.set_num_threads(1)
images = torch.rand(32, 32, 8, 8)
convolution = torch.nn.Conv2d(32, 32, 3)
limit_growth(int(sys.argv[1]) << 10)
try:
    convolution(images)
except Exception as error:
    print(memory_verdict(error).name)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts mapped memory in RLIMIT_DATA")
@pytest.mark.parametrize("limit_kib", [16, 256])
def test_convolution_in_little_memory_is_never_taken_for_another_error(limit_kib: int) -> None:
    """Whether torch's allocator fails or oneDNN's, which gives no reason, a smaller try is worth it."""
    command = [sys.executable, "-c", CONVOLUTION_IN_LITTLE_MEMORY, str(limit_kib)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() in ("YES", "MAYBE")
