"""Out-of-memory errors at a chosen operator, for tests of what survives them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anybatch.memory.device import MemoryKind, is_accelerator, memory_kind

__all__ = ["Fault", "fail_at", "out_of_memory"]

_PLACES = ("forward", "backward", "copy", "any")
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone", "aten::_pin_memory"})


@final
@dataclass(eq=False)
class Fault:
    """What `fail_at` saw.

    Attributes:
        n: The operator that is to fail, counted from 0.
        where: Which operators count.
        seen: How many operators of that kind there were.
        failed_at: The name of the one that failed; None as long as none did.
    """

    n: int
    where: str
    seen: int = 0
    failed_at: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def meets(self, operator: str, place: str) -> bool:
        """Counts an operator. Is it the one that is to fail?"""
        if self.where not in ("any", place):
            return False
        with self._lock:  # autograd has a thread for each accelerator
            self.seen += 1
            if self.seen != self.n + 1:
                return False
            self.failed_at = f"{operator} ({place})"
            return True


@contextmanager
def fail_at(n: int, where: str = "any") -> Iterator[Fault]:
    """A context in which the n-th operator of torch raises, once, the error of memory that has run out.

    The error has the class and the wording that the operator's device would give it, and comes before the
    operator has changed anything. All other operators run as they do without it, also those after it.

    Counted are operators that reach torch's dispatcher below autograd, views included, in the thread of the
    block and in those that autograd runs for it; of compiled code only those that it calls (its own kernels
    are none). What runs in another process, or on fake tensors, which take no memory, is not counted.

    Args:
        n: Which operator, counted from 0. None fails where there are no more than `n`.
        where: Which operators count: of `"backward"` all that autograd runs, what checkpointing runs again
            included; of `"copy"` others that only copy, to a device say; of `"forward"` the rest; `"any"`
            for all of them.

    Yields:
        What was seen; `failed_at` is None where the operator was not met.

    Raises:
        ValueError: `n` is negative, or there is no such place.

    Example:
        A test in which every operator fails once:

        >>> import torch
        >>> from anybatch.testing import fail_at
        >>> weight = torch.ones(3, requires_grad=True)
        >>> def step():
        ...     weight.grad = None
        ...     (weight * 2).sum().backward()
        >>> n, survived = 0, 0
        >>> while True:
        ...     with fail_at(n) as fault:
        ...         try:
        ...             step()
        ...         except RuntimeError:
        ...             step()
        ...     if fault.failed_at is None:
        ...         break
        ...     survived += weight.grad.tolist() == [2.0, 2.0, 2.0]
        ...     n += 1
        >>> survived == n > 3
        True
    """
    if isinstance(n, bool) or n < 0:
        raise ValueError(f"`fail_at`: operators are counted from 0. Got n={n!r}. Pass 0.")
    if where not in _PLACES:
        raise ValueError(f'`fail_at`: `where` is one of {_PLACES}. Got {where!r}. Pass "any".')
    fault = Fault(n, where)
    with _Faulty(fault):
        yield fault


def out_of_memory(device: torch.device, size_bytes: int) -> RuntimeError:
    """The error that torch raises when a device has no memory of some size left."""
    kind = memory_kind(device)
    if kind is MemoryKind.CACHED:
        # Source: c10/cuda/CUDACachingAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp (torch 2.13).
        return torch.OutOfMemoryError(
            f"{device.type.upper()} out of memory. Tried to allocate {_mib(size_bytes)}. "
            f"GPU {device.index or 0} has no memory free (raised by `fail_at`)."
        )
    if kind is MemoryKind.METAL:
        # Source: aten/src/ATen/mps/MPSAllocator.mm (torch 2.13).
        return RuntimeError(
            f"MPS backend out of memory (MPS allocated: {_mib(size_bytes)}, other allocations: 0 MiB, max "
            f"allowed: {_mib(size_bytes)}). Tried to allocate {_mib(size_bytes)} (raised by `fail_at`)."
        )
    # Source: c10/core/impl/alloc_cpu.cpp (torch 2.13).
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        f"to allocate {size_bytes} bytes. Error code 12 (Cannot allocate memory) (raised by `fail_at`)"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f} MiB"


@final
class _Faulty(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The default imports torch._dynamo, for seconds (torch 2.13)."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func.name())
        if not _is_symbolic() and self._fault.meets(name, _place(name)):
            values = tree_leaves((args, kwargs))
            tensors = [value for value in values if isinstance(value, Tensor)]
            raise out_of_memory(_device(tensors, values), max(map(_bytes, tensors), default=0))
        return func(*args, **kwargs)


def _is_symbolic() -> bool:
    """Do operators run on fake tensors? These have no memory that could run out."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _place(name: str) -> str:
    # The only way to ask whether autograd is at work in this thread (torch 2.13); -1 where it is not.
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "copy" if name.split(".")[0] in _COPIES else "forward"


def _device(tensors: Iterable[Tensor], values: Iterable[Any]) -> torch.device:
    """Where the operator takes its memory: on the accelerator that it names, if it names one."""
    devices = [value for value in values if isinstance(value, torch.device)]
    devices += [tensor.device for tensor in tensors]
    return next(filter(is_accelerator, devices), torch.device("cpu"))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
