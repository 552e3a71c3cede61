"""The thread that looks again and again."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from anybatch.memory.sampler import Sampler


def test_it_has_looked_when_it_has_begun() -> None:
    """When `start` returns, the thread has looked once; when `stop` returns, it is gone."""
    threads, looks = threading.active_count(), []
    sampler = Sampler(lambda: looks.append(threading.current_thread()), 60.0)
    sampler.start()
    assert len(looks) == 1
    assert looks[0] is not threading.main_thread()
    sampler.stop()
    assert threading.active_count() == threads


def test_it_looks_again_and_again() -> None:
    """It looks until it is stopped, and can begin anew."""
    third = threading.Event()
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) >= 3:
            third.set()

    sampler = Sampler(look, 0.001)
    for _ in range(2):
        looks.clear()
        third.clear()
        sampler.start()
        assert third.wait(10)
        sampler.stop()
    count = len(looks)
    assert not third.wait(0) or len(looks) == count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failure_of_the_first_look_is_no_deadlock() -> None:
    """A look that fails ends the thread, and lets the program go on."""

    def fail() -> None:
        raise KeyError

    sampler = Sampler(fail, 60.0)
    sampler.start()
    sampler.stop()


def test_interval_of_zero_is_no_thread() -> None:
    """Without an interval nothing looks."""
    threads = threading.active_count()
    sampler = Sampler(lambda: None, 0)
    sampler.start()
    assert threading.active_count() == threads
    sampler.stop()


GROWTH = """
import torch
from anybatch.memory.process import Currency, HostCounter
from anybatch.memory.sampler import Sampler
count = HostCounter(Currency.DATA)
begin = count()
sampler = Sampler(lambda: None, 60.0)
sampler.start()
print(count() - begin)
sampler.stop()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_thread_adds_little_to_what_is_held() -> None:
    """Its stack does not add the 8 MiB of data that a thread takes by default."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 2 << 20
