"""What the figures were measured with."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Hardware and versions."""

    processor: str
    cpus: int
    torch_threads: int
    python: str
    torch: str
    anybatch: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cpus} CPUs, {self.torch_threads} threads of torch; "
            f"Python {self.python}, torch {self.torch}, anybatch {self.anybatch}"
        )


def machine() -> Machine:
    """This machine, with the threads that torch uses now."""
    return Machine(
        _processor(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.get_num_threads(),
        platform.python_version(),
        torch.__version__,
        version("anybatch"),
    )


def _processor() -> str:
    """The processor's name as the kernel gives it, where it does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
