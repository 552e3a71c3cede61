"""A ceiling on what this process may hold, so that too much raises instead of swapping."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from anybatch.errors import TechniqueError
from anybatch.memory.reading import in_words
from anybatch.techniques.ceilings import Ceiling, ceiling_of
from anybatch.techniques.technique import Setting, Technique
from anybatch.techniques.watermarks import set_watermarks


@final
@dataclass(frozen=True)
class MemoryCap(Technique):
    """Holds this process to so much of the device's memory, for the length of a run.

    An allocation beyond it raises torch's out-of-memory error. Memory that other programs use, or lack, plays
    no part, and nothing is reserved. On the host all data of the process count (Linux, RLIMIT_DATA); on a
    device what torch's allocator holds, caches included.

    Error: exact. Nothing is computed differently.

    Source: setrlimit(2); `torch.cuda.set_per_process_memory_fraction`, and its like for other devices.

    Attributes:
        max_bytes: The most, in bytes.
        fraction: The most, as a part of the device's memory, or of the host's (the control group's, where
            that has less), above 0 and at most 1. On Metal a part of what it recommends, at most 2. One of
            the two is given.

    Raises:
        TechniqueError: Both are given, or none, or one is no such figure.

    >>> MemoryCap(fraction=0.5)
    MemoryCap(max_bytes=None, fraction=0.5)
    """

    recommendation: ClassVar[int | None] = 9
    source: ClassVar[str] = "setrlimit(2); torch.cuda.set_per_process_memory_fraction and its like"
    exactness: ClassVar[str] = "Exact: nothing is computed differently; what does not fit raises."

    max_bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        wrong = list(self._wrong())
        if wrong:
            raise TechniqueError(
                f"`MemoryCap`: `max_bytes` is at least 1 byte, or `fraction` above 0 and at most 1 (2 on "
                f"Metal). Got {' and '.join(wrong)}. Write MemoryCap(fraction=0.8), for example."
            )

    def _wrong(self) -> Iterator[str]:
        if (self.max_bytes is None) == (self.fraction is None):
            yield f"max_bytes={self.max_bytes!r} with fraction={self.fraction!r}"
        is_whole = isinstance(self.max_bytes, int) and not isinstance(self.max_bytes, bool)
        if self.max_bytes is not None and not (is_whole and self.max_bytes >= 1):
            yield f"max_bytes={self.max_bytes!r}"
        is_number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if self.fraction is not None and not (is_number and 0 < self.fraction <= 2):
            yield f"fraction={self.fraction!r}"

    def check(self, setting: Setting) -> None:
        self._check(ceiling_of(setting.device), setting)

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        ceiling = ceiling_of(setting.device)
        self._check(ceiling, setting)
        before = ceiling.lower(self._wanted_bytes(ceiling))
        try:
            yield
        finally:
            ceiling.put_back(before)

    def set_watermarks(self) -> None:
        """Sets both watermarks of Metal, for this process and its children, before the first tensor there.

        The high one is the fraction. The low one, from which on memory is given back early, must not be
        above it, and is as torch sets it or the fraction, whichever is less.

        Raises:
            TechniqueError: The cap is in bytes; there is no Metal; or it has tensors already, which is too
                late: torch reads the variables once. Then `applied` still sets the high one.
        """
        if self.fraction is None:
            raise TechniqueError(
                f"`MemoryCap`: watermarks are parts of what Metal recommends. Got "
                f"max_bytes={self.max_bytes}. Give `fraction`."
            )
        set_watermarks(self.fraction)

    def _wanted_bytes(self, ceiling: Ceiling) -> int:
        if self.max_bytes is not None:
            return self.max_bytes
        assert self.fraction is not None
        return int(self.fraction * ceiling.total_bytes())

    def _check(self, ceiling: Ceiling, setting: Setting) -> None:
        reason = ceiling.unusable()
        if reason is not None:
            raise TechniqueError(
                f"`MemoryCap`: somebody must hold the process to it. Got {setting.device}, {reason}. "
                "Leave it out."
            )
        wanted_bytes, total_bytes = self._wanted_bytes(ceiling), ceiling.total_bytes()
        held_bytes, most_bytes = ceiling.held_bytes(), ceiling.most_bytes()
        if wanted_bytes > most_bytes:
            got = f"{setting.device}, where {in_words(most_bytes)} is the most already"
        elif wanted_bytes <= held_bytes:
            got = f"{setting.device}, where {in_words(held_bytes)} are held already"
        else:
            return
        raise TechniqueError(
            f"`MemoryCap`: a cap lies between what is held and what can be had. Got {in_words(wanted_bytes)} "
            f"of {in_words(total_bytes)} for {got}. Give another figure."
        )
