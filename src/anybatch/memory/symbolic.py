"""One step on fakes: its memory operator by operator, without its memory and its arithmetic."""

from __future__ import annotations

import gc
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anybatch.memory.device import RandomState, accelerators
from anybatch.memory.faking import FakeMode, Untraceable, faked_modules
from anybatch.memory.hidden import hidden_in
from anybatch.memory.trace import Trace
from anybatch.memory.tracker import Tracker

__all__ = ["MODULES", "Fakes", "SymbolicRun", "Untraceable", "run_symbolically"]

_T = TypeVar("_T")
MODULES = "modules"


@final
@dataclass(frozen=True, eq=False)
class SymbolicRun:
    """What a run on fakes showed.

    Attributes:
        trace: Bytes at each operator.
        hidden: What the run can't see, one sentence per operator: workspace that kernels take beside tensors.
        kept: Fakes that somebody keeps beyond the run, in words. The program has state of its own that now
            holds fakes, which is to be said to the caller.
    """

    trace: Trace
    hidden: tuple[str, ...]
    kept: tuple[str, ...]


@final
class Fakes:
    """What a symbolic run is given: makes fakes, and says what the run is doing.

    Attributes:
        tracker: Counts the run; its `phase` may be set.
    """

    def __init__(self, mode: FakeMode, tracker: Tracker) -> None:
        self._mode = mode
        self.tracker = tracker

    def fake(self, value: _T, counts: bool = True) -> _T:
        """The same value with a fake for every tensor: same shape, strides, dtype, device, `requires_grad`.

        Parameters and buffers that were swapped have the fake that stands for them. Any other tensor gets a
        new one, as if it had just been copied to its device; it may die when the run lets go of it. Tensors
        that share a storage share one again, as large as what they see of it.

        Args:
            value: A tensor, or lists, tuples and dicts of them; anything else stays as it is.
            counts: Is it memory of this run? False for what is there anyway.
        """
        leaves, structure = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self._mode.known(leaf) is None]
        made = self._made(tensors)
        if not counts:
            self.tracker.leave_out(made)
        new = {id(tensor): fake for tensor, fake in zip(tensors, made, strict=True)}
        swapped = [
            new.get(id(leaf), self._mode.known(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        result: _T = pytree.tree_unflatten(swapped, structure)
        return result

    def constant(self, tensor: Tensor) -> Tensor:
        """The fake of a real tensor of one element; it knows the value, and does not count."""
        made = self._mode.constant(tensor)
        self.tracker.leave_out([made])
        return made

    def _made(self, tensors: list[Tensor]) -> list[Tensor]:
        phase, self.tracker.phase = self.tracker.phase, "inputs"
        try:
            return self._mode.fake_together(tensors)
        finally:
            self.tracker.phase = phase


def run_symbolically(
    run: Callable[[Fakes], object],
    modules: Iterable[torch.nn.Module] = (),
    *,
    counts_modules: bool = False,
    device: torch.device | None = None,
    label: Callable[[], str] | None = None,
) -> SymbolicRun:
    """Runs a step on fakes. It costs the time of its dispatch, and no memory, at any number of rows.

    The modules hold fakes meanwhile, with gradients of `None`; tensors that the step reaches in other ways
    are replaced as they come in. Afterwards parameters, buffers, attributes and modes of the modules,
    gradients and random state (torch's, Python's, numpy's) are what they were, also when the step fails.
    Hooks of parameters and of optimizers do not run; those of modules do. Compiled functions run as they
    are written. The garbage collector rests, so that two runs free alike.

    Args:
        run: The step. What it returns is alive at the end of the trace, and dropped then.
        modules: Modules whose parameters and buffers it uses.
        counts_modules: Do their parameters and buffers count?
        device: Count this device only; all where not said.
        label: Says at each operator where in the program it is.

    Raises:
        Untraceable: The step needs values (`.item()`, masks, `.numpy()`), or fails for another reason.
    """
    mode, tracker = FakeMode(), Tracker(label)
    with _as_before(), _memory_rests():
        try:
            with faked_modules(modules, mode.fake):
                tracker.hold(mode.fakes(), MODULES)
                with mode, tracker:
                    result = run(Fakes(mode, tracker))
                trace = tracker.trace(device)
                del result
        except Untraceable:
            raise
        # Whatever fails on fakes is for a run on real tensors to show: it may be the caller's own error.
        except Exception as error:
            raise _told(error) from None
        finally:
            mode.give_back()
    if not counts_modules:
        trace = trace.without(MODULES)
    return SymbolicRun(trace, hidden_in(trace.operators), _kept(tracker))


def _told(error: Exception) -> Untraceable:
    """The error without its frames, which would keep fakes alive."""
    tell_name = getattr(getattr(error, "func", None), "name", None)
    name = tell_name() if callable(tell_name) else None
    first_line = (str(error).strip() or "no message").splitlines()[0]
    reason = f"{type(error).__name__}: {first_line}{_place_of(error)}"
    traceback.clear_frames(error.__traceback__)
    return Untraceable(reason, name)


def _place_of(error: Exception) -> str:
    """Where outside torch and this library it happened."""
    own = [torch.__path__[0], __file__.rpartition("memory")[0]]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(frame.filename.startswith(folder) for folder in own)
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _kept(tracker: Tracker) -> tuple[str, ...]:
    if tracker.living_tensors():
        gc.collect()
    return tracker.living_tensors()


@contextmanager
def _as_before() -> Iterator[None]:
    """Random state, warnings and autocast's cache are as they were; compiled functions run as written."""
    state = RandomState.capture(_initialised_accelerators())
    pythons, numpys = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # What is worth a warning is worth it in the real run.
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            state.restore()
            random.setstate(pythons)
            np.random.set_state(numpys)
            # A surrounding autocast keeps the fakes that it has cast until it ends.
            torch.clear_autocast_cache()


def _initialised_accelerators() -> list[torch.device]:
    return [device for device in accelerators() if torch.get_device_module(device).is_initialized()]


@contextmanager
def _memory_rests() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
