"""The command's side of a child: started early, told to act when all is ready, gone with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self, final

from anybatch.cli.demo.child import order_line
from anybatch.cli.demo.messages import Progress, Result, decode
from anybatch.cli.demo.settings import MALLOC_ENVIRONMENT, Settings

__all__ = ["Child", "ChildError"]

_LAST_LINES = 5
# -P: a file in the user's folder must not be taken for a library.
_COMMAND = (sys.executable, "-P", "-m", "anybatch.cli.demo.child")


class ChildError(RuntimeError):
    """A child ended without a result."""


@final
class Child:
    """A process that loads its libraries at once and then waits for its order.

    As a context manager it never outlives the block, whatever ends it.
    """

    def __init__(self) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=os.environ | MALLOC_ENVIRONMENT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def run(
        self, act: str, digits_file: Path, settings: Settings, on_progress: Callable[[Progress], None]
    ) -> Result:
        """Gives the order and follows it to its result.

        Raises:
            ChildError: The process ended without one.
        """
        self._give(order_line(act, digits_file, settings))
        result = self._follow(on_progress)
        exit_code = self._process.wait()
        if result is None:
            raise ChildError(
                f"`demo`: every act ends with a result. {act} ended with {_ending(exit_code)}."
                f"{self._last_words()}"
            )
        return result

    def _give(self, order: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already; what it leaves behind says why

    def _follow(self, on_progress: Callable[[Progress], None]) -> Result | None:
        assert self._process.stdout is not None
        result: Result | None = None
        for line in self._process.stdout:
            message = decode(line)
            if isinstance(message, Progress):
                on_progress(message)
            else:
                result = message
        return result

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {signal.Signals(-exit_code).name}"
