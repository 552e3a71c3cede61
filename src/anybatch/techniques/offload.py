"""Offload: what autograd saves leaves the device until backward needs it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, final

from anybatch.errors import TechniqueError
from anybatch.memory.device import MemoryKind, is_accelerator, memory_kind
from anybatch.techniques.away import Keeper, SavedElsewhere
from anybatch.techniques.host_memory import HostMemory
from anybatch.techniques.scratch_file import ScratchFile, check_folder
from anybatch.techniques.technique import Setting, Technique


@final
@dataclass(frozen=True)
class Offload(Technique):
    """Moves what forward saves for backward out of the device's memory, and back when backward asks.

    From an accelerator it goes to page-locked memory of the host, and comes back ahead of time, on a stream
    of its own. From a CPU it goes to files in a folder, which have no name and are gone with the values.
    Parameters and buffers stay where they are. It costs a copy out and a copy in of all that is saved.

    A run enters `forward` around the forward of each piece; backward runs outside of it.

    Error: exact. The values come back bit for bit.

    Source: `torch.autograd.graph.saved_tensors_hooks`; Rhu et al., "vDNN", 2016.

    Attributes:
        min_bytes: Smaller tensors stay; at least 1.
        folder: A folder on a disk, for what leaves a CPU's memory; None for the system's temporary folder.

    Raises:
        TechniqueError: An option is none of these.

    >>> Offload(min_bytes=4096)
    Offload(min_bytes=4096, folder=None)
    """

    source: ClassVar[str] = "torch.autograd.graph.saved_tensors_hooks; Rhu et al., vDNN, 2016"
    exactness: ClassVar[str] = "Exact: the values come back bit for bit."

    min_bytes: int = 2**20
    folder: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        wrong = [*_wrong_bytes(self.min_bytes), *_wrong_folder(self.folder)]
        if wrong:
            raise TechniqueError(
                "`Offload`: `min_bytes` is a whole number of bytes from 1 on, and `folder` the path of a "
                f"folder. Got {' and '.join(wrong)}. Write Offload(min_bytes=2**20), for example."
            )
        if self.folder is not None:
            object.__setattr__(self, "folder", fspath(self.folder))

    def check(self, setting: Setting) -> None:
        kind = memory_kind(setting.device)
        if kind is MemoryKind.HOST:
            check_folder(self._folder(), self.min_bytes)
        elif kind in (MemoryKind.METAL, MemoryKind.NONE):
            reason = (
                "shares its memory with the host" if kind is MemoryKind.METAL else "holds no values to move"
            )
            raise TechniqueError(
                f"`Offload`: values move to another memory. Got {setting.device}, which {reason}. Use "
                "Checkpointing() there."
            )

    @contextmanager
    def forward(self, setting: Setting) -> Iterator[None]:
        own = (*setting.model.parameters(), *setting.model.buffers())
        saved = SavedElsewhere(self._keeper(setting), setting.device, self.min_bytes, own)
        with saved.hooks():
            yield

    def _keeper(self, setting: Setting) -> Keeper:
        if is_accelerator(setting.device):
            return HostMemory(setting.device)
        return ScratchFile(self._folder())

    def _folder(self) -> Path:
        return Path(self.folder if self.folder is not None else tempfile.gettempdir())


def _wrong_bytes(value: Any) -> list[str]:
    is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return [] if is_right else [f"min_bytes={value!r}"]


def _wrong_folder(value: Any) -> list[str]:
    is_right = value is None or (isinstance(value, str) and value) or isinstance(value, PathLike)
    return [] if is_right else [f"folder={value!r}"]
