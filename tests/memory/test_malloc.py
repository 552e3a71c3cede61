"""glibc's malloc: its threshold for mapping is set when asked for, and put back to what is known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import anybatch.memory.malloc as malloc
from anybatch.memory.malloc import MallocSetting, malloc_setting, mmap_threshold, set_mmap_threshold

KIB, MIB = 1 << 10, 1 << 20

pytestmark = pytest.mark.skipif(malloc_setting() is None, reason="memory does not come from glibc's malloc")


def run(program: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("MALLOC_MMAP_THRESHOLD_",)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    return result.stdout


SETTING = """
from anybatch.memory.malloc import malloc_setting, mmap_threshold, set_mmap_threshold
def say():
    setting = malloc_setting()
    print(setting.threshold_bytes, setting.is_adjusted, setting.source)
say()
with mmap_threshold(1 << 20) as is_set:
    say()
say()
print(set_mmap_threshold(1 << 16))
say()
"""


def test_setting_is_told_and_put_back_to_what_is_known() -> None:
    """The default is told as adjusted; after a block the size is the default's, adjusted no more."""
    assert run(SETTING).splitlines() == [
        "131072 True glibc's default",
        "1048576 False mallopt, set by anybatch",
        "131072 False glibc's default",
        "True",
        "65536 False mallopt, set by anybatch",
    ]


@pytest.mark.parametrize(
    ("environment", "first_line"),
    [
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "65536 False MALLOC_MMAP_THRESHOLD_"),
        ({"MALLOC_MMAP_THRESHOLD_": "many"}, "131072 True glibc's default"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=0x20000"},
            "131072 False GLIBC_TUNABLES (glibc.malloc.mmap_threshold)",
        ),
    ],
)
def test_setting_of_the_environment_is_told(environment: dict[str, str], first_line: str) -> None:
    """What the environment had set is known, and is what a block puts back."""
    lines = run(SETTING, **environment).splitlines()
    assert lines[0] == first_line
    assert lines[2].split()[0] == first_line.split()[0]


EFFECT = """
import ctypes, sys
from anybatch.memory.malloc import mmap_threshold
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def mapped(address):
    fields = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
    return not any(int(low, 16) <= address < int(high, 16) for low, high in fields)
large = library.malloc(24 << 20)
library.free(large)  # glibc raises its threshold to this
first = library.malloc(8 << 20)
with mmap_threshold(1 << 20):
    second = library.malloc(9 << 20)
print(mapped(first), mapped(second))
"""


def test_setting_has_the_effect_that_is_said() -> None:
    """What glibc would take from its heap, since larger memory was freed, is mapped by itself meanwhile."""
    assert run(EFFECT).split() == ["False", "True"]


def test_import_sets_nothing() -> None:
    """Importing, also the module for tests, leaves malloc as it is (Rule 6)."""
    program = "import anybatch, anybatch.testing\n" + SETTING
    assert run(program).splitlines()[0] == "131072 True glibc's default"


@pytest.mark.parametrize("threshold_bytes", [0, -1])
def test_size_below_one_is_refused(threshold_bytes: int) -> None:
    """A size that is none is a `ValueError` with what to pass."""
    with pytest.raises(ValueError, match="at least 1 byte"):
        set_mmap_threshold(threshold_bytes)


@pytest.mark.parametrize("name", [None, "musl 1.2.5", "raises"])
def test_other_library_says_so(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """Where the C library is another one nothing is set, and that is said."""

    def confstr(question: str) -> str | None:
        if name == "raises":
            raise ValueError(question)
        return name

    monkeypatch.setattr(os, "confstr", confstr)
    assert malloc_setting() is None
    assert set_mmap_threshold(MIB) is False
    with mmap_threshold(MIB) as is_set:
        assert is_set is False


def test_other_malloc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another malloc was loaded before glibc's nothing is set, and that is said."""
    monkeypatch.setattr(malloc, "_has_own_malloc", lambda: False)
    assert malloc_setting() is None
    assert set_mmap_threshold(64 * KIB) is False


def test_setting_prints_well() -> None:
    """The setting names its size with the unit, and who set it."""
    assert "threshold_bytes=65536" in repr(MallocSetting(65536, False, "mallopt"))
