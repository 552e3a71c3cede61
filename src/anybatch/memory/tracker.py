"""Which storages are alive at every operator of a program: its memory, counted in bytes of tensors.

`torch.distributed._tools.mem_tracker` counts the same, but hooks every module and optimizer, and keeps
figures per module instead of a timeline that can be compared between two runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from anybatch.memory.scratch import CONVOLUTIONS, scratch_bytes
from anybatch.memory.trace import BEGIN, Lifetime, Trace

__all__ = ["Tracker"]

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, FakeTensor})
_ALIVE = -1


class _Record(weakref.ref[torch.UntypedStorage]):
    """One storage at one size: when it came, when it went."""

    __slots__ = ("amount_bytes", "born", "counts", "device", "died", "holder", "is_claimed", "key")
    key: int
    device: torch.device
    holder: str
    is_claimed: bool
    amount_bytes: int
    born: int
    died: int
    counts: bool


@final
class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Counts the bytes of all storages that come to life during a `with` block, and when each dies.

    What counts: storages that an operator makes, and those given to `hold`. A storage counts once,
    however many tensors view it, from the operator that makes it until nobody refers to it; where it is
    resized it counts with its new size. What does not count: storages that were there before, or come
    in otherwise (`torch.from_numpy`), and all views of them. Operators are seen as torch dispatches them
    below autograd; what a kernel takes and gives back inside is not seen.

    There is one event per operator that makes something, taken when its outputs exist and its inputs are
    still there. So two runs of one program give the same events, at whatever sizes, and the largest event
    is the peak. Views and operators that work in place can't add to it, and give no event.

    The tracker works on real and on fake tensors; over fakes it must be entered after their mode.
    It keeps one small object per storage that ever was: it is for steps, not for hours.

    Attributes:
        phase: What the program is doing, as the events are to say; backward is told by itself.

    Example:
        >>> x = torch.ones(4, dtype=torch.float64)
        >>> with Tracker() as tracker:
        ...     y = (x + 1) * 2
        >>> tracker.peak_bytes, tracker.live_bytes
        (64, 32)
    """

    def __init__(self, label: Callable[[], str] | None = None) -> None:
        """Prepares to count.

        Args:
            label: Says at every operator where in the program it is, the module for example.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self._label = label
        self._known: dict[int, _Record] = {}
        self._records: list[_Record] = []
        self._operators: list[Any] = [BEGIN]
        self._phases: list[str] = ["begin"]
        self._labels: list[str] = [""]
        self._scratch_bytes: list[int] = [0]

    def hold(self, tensors: Iterable[Tensor], holder: str = "held") -> None:
        """Counts the storages of tensors that exist already, from now until they die.

        Args:
            tensors: Any tensors; a storage that is known already stays as it is.
            holder: Whose they are, for `Trace.holders`.
        """
        for tensor in tensors:
            self._see(tensor, self._born_now(), holder)

    def claim(self, tensors: Iterable[Tensor], holder: str) -> None:
        """Says whose the storages of some tensors are, unless somebody has claimed them already.

        Args:
            tensors: Any tensors; storages that are not known are held from now on.
            holder: Whose they are, for `Trace.holders`.
        """
        for tensor in tensors:
            self._see(tensor, self._born_now(), holder)
            for storage in _storages(tensor):
                record = self._known[storage._cdata]
                if not record.is_claimed:
                    record.holder, record.is_claimed = holder, True

    def restart(self) -> None:
        """Forgets all events, and what has died. What is alive is there at the begin, with no label."""
        self._records = list(self._known.values())
        for record in self._records:
            record.born = 0
        self._operators, self._phases, self._labels = [BEGIN], ["begin"], [""]
        self._scratch_bytes = [0]

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """From the begin on, the storages of some tensors do not count."""
        for tensor in tensors:
            for storage in _storages(tensor):
                if storage._cdata in self._known:
                    self._known[storage._cdata].counts = False

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are alive now, on all devices."""
        return sum(record.amount_bytes for record in self._known.values() if record.counts)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at one event, on all devices."""
        return self.trace().peak_bytes

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the storages that were counted, in the order of their first storage."""
        return tuple(dict.fromkeys(record.device for record in self._records))

    def living_tensors(self) -> tuple[str, ...]:
        """A description of each storage that is alive now."""
        return tuple(self._described(record) for record in self._known.values())

    def trace(self, device: torch.device | None = None) -> Trace:
        """What was seen so far.

        Args:
            device: Count storages of this device only; of all where not said.
        """
        events = len(self._operators)
        lifetimes = [
            Lifetime(
                record.born,
                events + 1 if record.died == _ALIVE else record.died,
                record.amount_bytes,
                record.holder,
            )
            for record in self._records
            if record.counts and (device is None or record.device == device)
        ]
        names = [operator if isinstance(operator, str) else operator.name() for operator in self._operators]
        return Trace.of(names, self._phases, self._labels, lifetimes, self._scratch_bytes)

    def __enter__(self) -> Self:
        _followers.append(self)
        if len(_followers) == 1:
            torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        _followers.remove(self)
        if not _followers:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]

    def _born_now(self) -> int:
        """What is held before the first operator is there at the begin."""
        return 0 if len(self._operators) == 1 else len(self._operators)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch 2.13 loads its compiler (a second), and every operator passes through it.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            look = _looks[func]
        except KeyError:
            look = _looks[func] = _look_at(func)
        if look is not None:
            look(self, args, result)
            self._note(func, scratch_bytes(func, args, result) if func in CONVOLUTIONS else 0)
        return result

    def _note(self, operator: Any, scratch_bytes: int = 0) -> None:
        self._operators.append(operator)
        self._scratch_bytes.append(scratch_bytes)
        self._phases.append(self._phase_now())
        self._labels.append("" if self._label is None else self._label())

    def _phase_now(self) -> str:
        return self.phase if torch._C._current_graph_task_id() == -1 else "backward"

    def _see_outputs(self, args: Sequence[Any], result: Any) -> None:
        if isinstance(result, Tensor):
            self._see(result, len(self._operators), self._phase_now())
        elif isinstance(result, list | tuple):
            for each in result:
                self._see_outputs(args, each)

    def _see_sizes(self, args: Sequence[Any], result: Any) -> None:
        tensors = [result, *args[:1]] if isinstance(result, Tensor) or result is None else [*result]
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor):
                    self._resized(storage)

    def _see(self, tensor: Tensor, born: int, holder: str) -> None:
        if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._add(storage, tensor.device, born, holder)
            return
        for storage in _storages(tensor):
            if storage._cdata not in self._known:
                self._add(storage, tensor.device, born, holder)

    def _add(self, storage: torch.UntypedStorage, device: torch.device, born: int, holder: str) -> None:
        record = _Record(storage, self._died)
        record.key = storage._cdata
        record.device = device
        record.holder = holder
        record.is_claimed = False
        record.amount_bytes = storage.nbytes()
        record.born = born
        record.died = _ALIVE
        record.counts = True
        self._known[record.key] = record
        self._records.append(record)

    def _died(self, record: _Record) -> None:
        record.died = len(self._operators)
        if self._known.get(record.key) is record:
            del self._known[record.key]

    def _resized(self, storage: torch.UntypedStorage) -> bool:
        record = self._known.get(storage._cdata)
        if record is None or record.amount_bytes == storage.nbytes():
            return False
        record.died = now = len(self._operators)
        self._add(storage, record.device, now, record.holder)
        resized = self._known[storage._cdata]
        resized.counts, resized.is_claimed = record.counts, record.is_claimed
        return True

    def _told_of_resize(self, storage: torch.UntypedStorage) -> None:
        if self._resized(storage):
            self._note("storage::resize_")

    def _described(self, record: _Record) -> str:
        operator = self._operators[min(record.born, len(self._operators) - 1)]
        name = operator if isinstance(operator, str) else operator.name()
        return f"{record.amount_bytes} bytes, made by {name}"


_Look = Callable[[Tracker, Sequence[Any], Any], None]
_looks: dict[Any, _Look | None] = {}
_followers: list[Tracker] = []
_resize = torch.UntypedStorage.resize_


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
    """Resizes a storage, which no dispatch mode is told of, and tells the trackers."""
    _resize(storage, size)
    for tracker in _followers:
        tracker._told_of_resize(storage)


def _look_at(operator: Any) -> _Look | None:
    """Where an operator's new bytes are to be looked for, by its schema; None where it has none."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name in ("aten::lift_fresh", "aten::lift"):
        return Tracker._see_outputs
    if "resize" in schema.name or schema.name == "aten::set_" or any(arg.is_out for arg in schema.arguments):
        return Tracker._see_sizes
    aliases = [each.alias_info is not None or not _has_tensors(each.type) for each in schema.returns]
    if all(aliases):
        return None
    if not any(aliases):
        return Tracker._see_outputs
    return _look_at_new([index for index, is_alias in enumerate(aliases) if not is_alias])


def _has_tensors(kind: Any) -> bool:
    return "Tensor" in str(kind)


def _look_at_new(positions: list[int]) -> _Look:
    def look(tracker: Tracker, args: Sequence[Any], result: Any) -> None:
        tracker._see_outputs(args, [result[position] for position in positions])

    return look


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of any tensor; none of one whose memory torch does not show."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is not torch.strided:
        return
    else:
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # functional and batched wrappers have none
            return
        return
    for part in parts:
        yield from _storages(part)
