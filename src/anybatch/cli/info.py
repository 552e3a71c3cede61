"""`anybatch info`: versions, devices, memory and limits, for a look or a report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from anybatch.memory.device import accelerators, device_name
from anybatch.memory.limit import host_limits
from anybatch.memory.malloc import malloc_setting
from anybatch.memory.reading import Reading, in_words
from anybatch.memory.state import memory_of

__all__ = ["info"]

_REQUIRED = ("anybatch", "torch", "numpy", "psutil", "rich", "typer", "matplotlib")
_FIGURES = ("figure", "still free")
_OPTIONAL = ("scikit-learn", "transformers", "mbp-pytorch")


def info() -> None:
    """Print versions, devices, memory and limits."""
    Console().print(
        Group(_version_table(), _device_table(), _memory_table(), _limit_table(), *_malloc_lines())
    )


def _malloc_lines() -> Iterator[Text]:
    """What glibc's malloc does with what is freed; nothing where memory does not come from it."""
    setting = malloc_setting()
    if setting is None:
        return
    threshold = in_words(setting.threshold_bytes)
    adjusted = ", raised as larger tensors are freed" if setting.is_adjusted else ""
    yield Text("\nmalloc (glibc)", style="bold")
    yield Text(f"gives back at once what is larger than {threshold}{adjusted} ({setting.source})")
    if setting.is_adjusted:
        yield Text(
            "With MALLOC_MMAP_THRESHOLD_=65536 a third more fits under a limit; small tensors get slower."
        )


def _version_table() -> Table:
    table = _titled("Versions", "package", "version")
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _REQUIRED:
        table.add_row(name, _version_of(name))
    for name in _OPTIONAL:
        table.add_row(f"{name} (optional)", _version_of(name))
    return table


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_table() -> Table:
    table = _titled("Devices", "device", "what it is")
    table.add_row("host", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    for device in accelerators():
        table.add_row(str(device), device_name(device))
    if not accelerators():
        table.add_row("accelerator", "none that torch can use")
    return table


def _memory_table() -> Table:
    table = _titled("Memory, as this process sees it", "device", "what", "figure", "source")
    for device in (torch.device("cpu"), *accelerators()):
        _add_readings(table, str(device), memory_of(device).readings)
    return table


def _limit_table() -> Table:
    table = _titled("Limits on the host's memory", "limit", "figure", "still free", "counts")
    for limit in host_limits():
        free = in_words(limit.free_bytes)
        table.add_row(limit.source, in_words(limit.amount_bytes), free, limit.currency.value)
    return table


def _add_readings(table: Table, device: str, readings: Iterable[Reading]) -> None:
    for reading in readings:
        figure = "none" if reading.amount_bytes is None else in_words(reading.amount_bytes)
        table.add_row(device, reading.quantity.value, figure, reading.source)


def _titled(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("figure", "still free") else "left", overflow="fold"
        )
    return table
