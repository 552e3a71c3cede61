"""Values of host tensors in a file without a name: the system writes it out, and reads it back when asked."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil
import torch
from torch import Tensor

from anybatch.errors import TechniqueError
from anybatch.techniques.away import Keeper, Place

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_MIB = 2**20


@final
class ScratchFile(Keeper):
    """One file for the values of one forward run; it is gone with the last of them, also when a process dies.

    Raises:
        TechniqueError: The folder can't be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.descriptor = _open(folder)
        self.end_bytes = 0
        weakref.finalize(self, os.close, self.descriptor)

    def put(self, values: Tensor) -> Place:
        content = values.view(torch.uint8).numpy().data
        place = _InFile(self, self.end_bytes, content.nbytes, values.dtype)
        self._check_free(content.nbytes)
        self._write(content)
        # A mapping begins at a multiple of this.
        granule = mmap.ALLOCATIONGRANULARITY
        self.end_bytes += -(-content.nbytes // granule) * granule
        return place

    def _write(self, content: memoryview) -> None:
        written = 0
        try:
            while written < content.nbytes:
                written += os.pwrite(self.descriptor, content[written:], self.end_bytes + written)
        except OSError as error:
            raise TechniqueError(
                f"`Offload`: what is saved is written to {self.folder}. Got {error.strerror} after "
                f"{(self.end_bytes + written) / _MIB:.1f} MiB. Name a folder with more space: "
                "Offload(folder=...)."
            ) from error

    def _check_free(self, bytes_: int) -> None:
        free = free_bytes(self.folder)
        if bytes_ > free:
            raise TechniqueError(
                f"`Offload`: what is saved is written to {self.folder}. Got {free / _MIB:.1f} MiB free "
                f"there, and a tensor of {bytes_ / _MIB:.1f} MiB. Name a folder with more space: "
                "Offload(folder=...)."
            )


@final
@dataclass(frozen=True, eq=False)
class _InFile(Place):
    file: ScratchFile
    begin_bytes: int
    length_bytes: int
    dtype: torch.dtype

    def get(self) -> Tensor:
        # Shared, so that it counts as the file's memory and not as the process's; nobody writes to it.
        mapped = mmap.mmap(
            self.file.descriptor, self.length_bytes, access=mmap.ACCESS_WRITE, offset=self.begin_bytes
        )
        return torch.frombuffer(mapped, dtype=self.dtype)


def free_bytes(folder: Path) -> int:
    """What this user may still write to a folder's disk."""
    return psutil.disk_usage(str(folder)).free


def check_folder(folder: Path, min_bytes: int) -> None:
    """Can values be kept there, outside of memory?

    Raises:
        TechniqueError: There is no such folder, nobody may write to it, it lies in memory, or it is full.
    """
    if not hasattr(os, "pwrite"):
        raise TechniqueError(
            "`Offload`: on a CPU values go to a file without a name. Got a system without such files. Use "
            "Checkpointing() there."
        )
    os.close(_open(folder))
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise TechniqueError(
            f"`Offload`: values leave memory for a disk. Got {folder}, which is a {kind} and lies in memory "
            "itself. Name a folder on a disk: Offload(folder=...)."
        )
    free = free_bytes(folder)
    if free < min_bytes:
        raise TechniqueError(
            f"`Offload`: the folder must hold a tensor at least. Got {free / _MIB:.1f} MiB free in {folder} "
            f"and tensors of {min_bytes / _MIB:.1f} MiB and more. Name a folder with space: "
            "Offload(folder=...)."
        )


def _open(folder: Path) -> int:
    """A descriptor of a new file that has no name, or none any more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise TechniqueError(
            f"`Offload`: the folder must be there and writable. Got {folder}: {error.strerror}. Name "
            "another: Offload(folder=...)."
        ) from error


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies in; empty where the system does not tell."""
    resolved = folder.resolve()
    holding = [each for each in psutil.disk_partitions(all=True) if resolved.is_relative_to(each.mountpoint)]
    # Of several mounted at one place the last one is seen.
    return (
        max(enumerate(holding), key=lambda each: (len(each[1].mountpoint), each[0]))[1].fstype
        if holding
        else ""
    )
