"""Which errors mean that the memory ran out, decided in one place (Rule 5).

torch has no single class for it: the host's allocator, cuBLAS, cuDNN, Metal and Level Zero each raise a
RuntimeError of their own wording, and other errors only sound alike. So the class decides first, and the text
only for the classes that such errors have.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["MemoryVerdict", "irrevocable", "is_out_of_memory", "memory_verdict"]


class MemoryVerdict(enum.Enum):
    """What an error says about memory."""

    YES = "out of memory"
    MAYBE = "often out of memory: worth a smaller try, else the error stands as it is"
    NO = "something else"


# Source of the wordings: pytorch/pytorch#44473, #20618, #148642, #177714 and the sources of c10's allocators.
_MEANS_OUT_OF_MEMORY = re.compile(
    r"""
      \bout\ of\ memory\b(?!\ (?:bounds|range))       # CUDA, HIP, XPU, MPS, NCCL, Triton, XLA
    | \b(?:can't|cannot|could\ not)\ allocate\ memory\b
    | \b(?:unable|failed)\ to\ allocate\b.*\b(?:bytes|buffer|[KMGTPE]iB)\b
    | \bnot\ enough\ memory\b
    | \bbad_alloc\b                                   # C++, also where torch turns it into a RuntimeError
    | ^invalid\ buffer\ size:                         # Metal
    | ALLOC(?:ATION)?_FAILED\b                        # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT, hipBLAS
    | \bcudaErrorMemoryAllocation\b | \bhipErrorOutOfMemory\b
    | OUT_OF_(?:DEVICE_|HOST_)?MEMORY\b               # Level Zero, Vulkan, OpenCL
    """,
    re.VERBOSE | re.IGNORECASE,
)
_MAY_MEAN_OUT_OF_MEMORY = re.compile(
    r"""
      \bCUDNN_STATUS_(?:NOT_SUPPORTED|NOT_INITIALIZED|INTERNAL_ERROR)\b
    | \bCUBLAS_STATUS_NOT_INITIALIZED\b               # creating the handle takes memory
    | \bunable\ to\ find\ (?:a\ valid\ cuDNN\ algorithm|an\ engine)\b
    | NVML_SUCCESS\ ==\ r\b.*CUDACachingAllocator     # raised while an out-of-memory message is written
    | OUT_OF_RESOURCES\b
    | \bcould\ not\ (?:create|execute)\ a\ (?:primitive|memory\ object)\b    # oneDNN gives no reason
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


_FINAL = "_anybatch_is_final"


@contextmanager
def irrevocable() -> Iterator[None]:
    """A block that does what can't be undone: an error in it is no reason to try again."""
    try:
        yield
    except Exception as error:
        setattr(error, _FINAL, True)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or one that it wraps, certainly means that memory ran out."""
    return memory_verdict(error) is MemoryVerdict.YES


def memory_verdict(error: BaseException) -> MemoryVerdict:
    """What the error says about memory, looking through explicit causes and exception groups.

    An interruption (KeyboardInterrupt, SystemExit), alone or in a group, is never a question of memory: it
    must not be answered by trying again. Nor is an error that left an `irrevocable` block.
    """
    members = list(_members(error))
    if not all(isinstance(member, Exception) for member in members) or hasattr(error, _FINAL):
        return MemoryVerdict.NO
    verdicts = {_verdict_of_one(member) for member in members}
    return next(
        (each for each in (MemoryVerdict.YES, MemoryVerdict.MAYBE) if each in verdicts), MemoryVerdict.NO
    )


def _members(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from and what it groups, each once: chains of causes can be circular."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        member = waiting.pop()
        if id(member) in seen:
            continue
        seen.add(id(member))
        yield member
        if member.__cause__ is not None:
            waiting.append(member.__cause__)
        if isinstance(member, BaseExceptionGroup):
            waiting.extend(member.exceptions)


def _verdict_of_one(error: BaseException) -> MemoryVerdict:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return MemoryVerdict.YES
    if isinstance(error, OSError):
        return MemoryVerdict.YES if error.errno == errno.ENOMEM else MemoryVerdict.NO
    # torch.AcceleratorError is a RuntimeError too, and no torch.OutOfMemoryError.
    return _verdict_of_text(str(error)) if isinstance(error, RuntimeError) else MemoryVerdict.NO


def _verdict_of_text(message: str) -> MemoryVerdict:
    if _MEANS_OUT_OF_MEMORY.search(message):
        return MemoryVerdict.YES
    if _MAY_MEAN_OUT_OF_MEMORY.search(message):
        return MemoryVerdict.MAYBE
    return MemoryVerdict.NO
