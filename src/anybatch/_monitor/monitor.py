"""The monitor: a context around training that tells what used memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, final

import torch
from torch.nn import Module
from torch.optim import Optimizer

from anybatch._monitor.findings import Findings
from anybatch._monitor.report import explained, report_of
from anybatch.fit.guard import is_out_of_memory
from anybatch.memory.counted import CountedRecording
from anybatch.memory.device import as_device, current_device, with_index
from anybatch.memory.gauge import gauge_of
from anybatch.memory.phases import PhaseHooks
from anybatch.memory.reading import in_words
from anybatch.memory.recording import Recording
from anybatch.memory.state import MemoryState, memory_of
from anybatch.memory.tracked import TrackedRecording

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MemoryMonitor"]

Kind = Literal["counters", "tracked"]
_KINDS = ("counters", "tracked")
_NOTE = "`MemoryMonitor`:"


@final
class MemoryMonitor:
    """Tells what used memory during training: when, in which phase, and who held it.

    A context around any training loop. Steps end where `optimizer.step()` does; the phases are forward (a
    module runs), backward, optimizer and other. After an out-of-memory error inside the block, the error has
    a note that says who held what. Nothing stays when the block ends: hooks and threads are gone, and the
    counters of the device were not reset.

    Error: `"counters"` knows the peak of a phase exactly where it is the highest so far, else from samples.
    `"tracked"` counts every tensor to the byte, and nothing else: not what kernels need inside.

    Example:
        >>> import anybatch
        >>> net = torch.nn.Linear(1000, 1000)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with anybatch.MemoryMonitor(net, optimizer) as monitor:
        ...     net(torch.ones(8, 1000)).sum().backward()
        ...     optimizer.step()
        >>> monitor.findings.steps_done
        1
    """

    def __init__(
        self,
        *watched: Module | Optimizer,
        device: str | int | torch.device | None = None,
        kind: Kind = "counters",
        per_module: bool = False,
        sample_s: float = 0.005,
    ) -> None:
        """Prepares to watch.

        Args:
            *watched: The modules whose forward is a phase, and optimizers. No module for whatever module
                runs, which costs a little for every module of a model: name them where one is compiled.
                Every optimizer that steps is watched; the state of those named counts from the begin.
            device: The device to watch; that of the modules, else the current accelerator, else the host.
            kind: `"counters"` reads what the device or the system counts, for 0.2 to 0.5 ms a step on a
                host. `"tracked"` follows every tensor, exactly and slowly.
            per_module: Tell activations apart by the module that made them; `"tracked"` only.
            sample_s: Seconds between two samples of `"counters"`, at least; 0 for none.

        Raises:
            ValueError: The options don't go together, or the device is not to be had.
            TypeError: Something to be watched is neither a module nor an optimizer.
        """
        modules = tuple(each for each in watched if isinstance(each, Module))
        optimizers = tuple(each for each in watched if isinstance(each, Optimizer))
        if len(modules) + len(optimizers) < len(watched):
            strange = next(each for each in watched if not isinstance(each, Module | Optimizer))
            raise TypeError(
                "`MemoryMonitor`: modules and optimizers can be watched. Got "
                f"{strange!r} ({type(strange).__name__}). Pass the model."
            )
        if kind not in _KINDS:
            raise ValueError(f'`MemoryMonitor`: `kind` is one of {_KINDS}. Got {kind!r}. Pass "counters".')
        if per_module and not (kind == "tracked" and modules):
            raise ValueError(
                '`MemoryMonitor`: `per_module` needs kind="tracked" and the modules. '
                f"Got kind={kind!r} and {len(modules)} modules. Pass both, or leave it out."
            )
        if not sample_s >= 0:
            raise ValueError(
                f"`MemoryMonitor`: `sample_s` is a number of seconds, 0 for no samples. Got {sample_s!r}. "
                "Pass 0.005."
            )
        self._modules = modules
        self._optimizers = optimizers
        self._given_device = as_device(device)
        self._kind: Kind = kind
        self._per_module = per_module
        self._sample_s = sample_s
        self._recording: Recording | None = None
        self._hooks: PhaseHooks | None = None
        self._memory: MemoryState | None = None

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise RuntimeError(
                "`MemoryMonitor`: a monitor watches one block at a time. Got a second `with` inside of its "
                "first. Make another monitor."
            )
        device = self._device()
        self._memory = memory_of(device)
        self._recording = self._new_recording(device)
        self._hooks = PhaseHooks(self._modules, self._recording)
        self._recording.begin()
        self._hooks.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hooks, self._hooks = self._hooks, None
        try:
            if error is not None and is_out_of_memory(error):
                self._explain(error)
        finally:
            if hooks is not None:
                hooks.remove()
            self._running().end()

    @property
    def findings(self) -> Findings:
        """What was found so far, as plain data. Also during the block."""
        recording = self._running()
        assert self._memory is not None
        return Findings(
            self._kind,
            self._memory,
            recording.source,
            recording.begin_bytes,
            recording.live_bytes,
            recording.peak_bytes,
            recording.steps_done,
            dict(recording.phases),
            tuple(recording.steps),
            recording.at_peak,
            recording.samples,
        )

    def report(self, console: Console | None = None) -> None:
        """Prints what was found as tables.

        Args:
            console: Where to; a terminal of its own where not said.
        """
        from rich.console import Console

        (console or Console()).print(report_of(self.findings))

    def __str__(self) -> str:
        if self._recording is None:
            return "MemoryMonitor that has not run yet"
        from rich.console import Console

        console = Console(width=100)
        with console.capture() as captured:
            console.print(report_of(self.findings))
        return captured.get()

    def plot(self, path: str | PathLike[str]) -> Path:
        """Draws what was in use over time, with the phases, the peak and the limit.

        Args:
            path: The file to write; its ending says the format, PNG for example.

        Returns:
            The path.
        """
        from anybatch._monitor.chart import draw

        draw(self.findings, Path(path))
        return Path(path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Everything that was found, as JSON.

        Args:
            path: A file to write it to as well.
        """
        text = json.dumps(self.findings.as_data())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def postfix(self) -> dict[str, str]:
        """Live, peak and limit for a progress bar: `bar.set_postfix(monitor.postfix())`."""
        recording = self._running()
        assert self._memory is not None
        limit_bytes = self._memory.limit.amount_bytes
        limit = {} if limit_bytes is None else {"limit": in_words(limit_bytes)}
        return {"live": in_words(recording.live_bytes), "peak": in_words(recording.peak_bytes), **limit}

    def log(self, writer: Any | Callable[..., Any], step: int) -> None:
        """Gives the figures to a logger, as `memory/live_bytes`, `memory/backward_peak_bytes` and so on.

        Args:
            writer: What has `add_scalar(name, value, step)`, as TensorBoard's `SummaryWriter` does; else it
                is called as `writer(scalars, step=step)`, as `wandb.log` and `mlflow.log_metrics` are.
            step: The step to log them for.
        """
        scalars: Mapping[str, float] = self.findings.scalars()
        if hasattr(writer, "add_scalar"):
            for name, amount in scalars.items():
                writer.add_scalar(name, amount, step)
        else:
            writer(dict(scalars), step=step)

    def _device(self) -> torch.device:
        tensors = (tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        first = next(tensors, None)
        if self._given_device is not None:
            return with_index(self._given_device)
        return current_device() if first is None else first.device

    def _new_recording(self, device: torch.device) -> Recording:
        if self._kind == "tracked":
            return TrackedRecording(device, self._modules, self._optimizers, self._per_module)
        gauge = gauge_of(device)
        return CountedRecording(gauge, device, self._modules, self._optimizers, self._sample_s)

    def _running(self) -> Recording:
        if self._recording is None:
            raise RuntimeError(
                "`MemoryMonitor`: there must be a block that was watched. Got a monitor that has not run. "
                "Put the training into `with monitor:` first."
            )
        return self._recording

    def _explain(self, error: BaseException) -> None:
        if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return
        recording = self._running()
        error.add_note(explained(self.findings, recording.phase, recording.held_now()))
