"""A thread that looks again and again, and adds as little as it can to what it looks at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

__all__ = ["Sampler"]

# The stack of a thread counts as data, 8 MiB by default; this one needs little.
_STACK_BYTES = 256 << 10


@final
class Sampler:
    """Calls a function about every so many seconds, from `start` to `stop`.

    When `start` returns, the thread has already called it once: what its own begin needs (glibc maps 128 MiB
    for a moment, for the first thread of a process) is over.
    """

    def __init__(self, look: Callable[[], None], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._has_looked = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins; does nothing where the interval is 0."""
        if self._interval_s <= 0:
            return
        self._stop.clear()
        self._has_looked.clear()
        self._thread = threading.Thread(target=self._run, name="anybatch sampler", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)
        self._has_looked.wait()

    def stop(self) -> None:
        """Ends; the thread is gone when this returns."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._look()
        finally:
            self._has_looked.set()
        while not self._stop.wait(self._interval_s):
            self._look()
