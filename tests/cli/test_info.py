"""`anybatch info`."""

from __future__ import annotations

import importlib.metadata
import platform

import psutil
import pytest
import torch
from typer.testing import CliRunner

import anybatch.cli.info as info
from anybatch.cli.app import app
from anybatch.memory.malloc import MallocSetting
from anybatch.memory.reading import Quantity, Reading
from anybatch.memory.state import MemoryState

GIB = 1 << 30


def printed(width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `anybatch info` prints on a terminal of this width."""
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert all(len(line) <= width for line in result.output.splitlines())
    return result.output


@pytest.mark.parametrize("width", [80, 120])
def test_info_prints_versions_and_memory(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are those installed, the machine's memory is what psutil says, and every line fits."""
    output = printed(width, monkeypatch)
    assert platform.python_version() in output
    assert importlib.metadata.version("torch") in output
    assert f"{psutil.virtual_memory().total / GIB:.1f} GiB" in output
    assert f"torch uses {torch.get_num_threads()} threads" in output


def test_info_without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional package that is missing is listed as not installed."""
    monkeypatch.setattr(info, "_OPTIONAL", ("no-such-package-of-anybody",))
    assert "not installed" in printed(100, monkeypatch)


def test_info_says_when_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator says so rather than leaving the line out."""
    monkeypatch.setattr(info, "accelerators", lambda: ())
    assert "none that torch can use" in printed(100, monkeypatch)


def test_info_lists_each_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every accelerator is named, with its memory; a figure that it does not keep is none."""
    state = MemoryState(
        torch.device("xpu", 1),
        live=Reading(Quantity.LIVE, 3 * GIB, "live source"),
        peak=Reading(Quantity.PEAK, None, "not kept"),
        reserved=Reading(Quantity.RESERVED, 4 * GIB, "reserved source"),
        limit=Reading(Quantity.LIMIT, 7 * GIB, "limit source"),
        budget=Reading(Quantity.BUDGET, 5 * GIB, "budget source"),
    )
    monkeypatch.setattr(info, "accelerators", lambda: (torch.device("xpu", 0), torch.device("xpu", 1)))
    monkeypatch.setattr(info, "device_name", lambda device: f"Card {device.index}")
    monkeypatch.setattr(info, "memory_of", lambda device: state)
    output = printed(100, monkeypatch)
    assert all(text in output for text in ("xpu:0", "Card 0", "xpu:1", "Card 1", "3.0 GiB", "7.0 GiB"))
    assert "none that torch can use" not in output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    assert ["xpu:1", "most in use so far", "none", "not kept"] in rows
    assert ["xpu:1", "to be had", "5.0 GiB", "budget source"] in rows


@pytest.mark.parametrize("is_adjusted", [True, False])
def test_info_says_what_malloc_does(is_adjusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold and who set it; what another would give, where it is glibc's default."""
    setting = MallocSetting(128 << 10, is_adjusted, "somebody")
    monkeypatch.setattr(info, "malloc_setting", lambda: setting)
    output = printed(120, monkeypatch)
    assert "larger than 128.0 KiB" in output
    assert "(somebody)" in output
    assert ("MALLOC_MMAP_THRESHOLD_" in output) is is_adjusted


def test_info_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not come from glibc there is nothing to say."""
    monkeypatch.setattr(info, "malloc_setting", lambda: None)
    assert "malloc" not in printed(80, monkeypatch)
