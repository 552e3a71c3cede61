"""Runs of functions in child processes that have imported what they need, and done nothing yet."""

import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anybatch.testing import memory_limit

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
"""glibc's malloc for all alike: else what fits is not repeatable, and may not even shrink with the size."""

LONGEST_S = 150


class ChildDied(Exception):
    """A child ended without an answer: killed, aborted or out of time."""


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a process of its own, forked from this one.

    Raises:
        ChildDied: It did not return.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer, function, *args)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        raise ChildDied(f"ended with signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended")
    found = json.loads(answer)
    if "raised" in found:
        raise ChildDied(found["raised"])
    return found["returned"]


def limited(function: Callable[..., Any], budget_bytes: int, *args: Any) -> Any:
    """`function(*args)()` in a child: the first call prepares, the second runs under the limit.

    The budget counts from what the process holds between the two.
    """
    return in_child(_limited, function, budget_bytes, *args)


def _limited(function: Callable[..., Any], budget_bytes: int, *args: Any) -> Any:
    run = function(*args)
    gc.collect()
    with memory_limit(budget_bytes):
        return run()


class Growth:
    """The most memory that this process was given beyond what it had at the start of a block.

    Resets the high-water mark of the process, as only a process of one's own may.
    """

    def __enter__(self) -> "Growth":
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._begin_bytes = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.growth_bytes = _resident_bytes("VmHWM") - self._begin_bytes


def _resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def _answer(writer: int, function: Callable[..., Any], *args: Any) -> None:
    signal.alarm(LONGEST_S)
    warnings.simplefilter("ignore")
    try:
        answer = json.dumps({"returned": function(*args)})
    except BaseException as error:
        traceback.print_exc()
        answer = json.dumps({"raised": f"{type(error).__name__}: {error}"})
    with os.fdopen(writer, "w") as pipe:
        pipe.write(answer)
    os._exit(0)
