"""The phases of training, told by hooks: which one begins, and where a step ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

__all__ = ["Listener", "Phase", "PhaseHooks"]

_MOST_HANDLES = 256


class Phase(Enum):
    """What a training program is doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Listener(Protocol):
    """Who is told."""

    def phase_begins(self, phase: Phase) -> None:
        """Another phase begins, or goes on."""

    def forward_begins(self, module: Module, inputs: Any) -> None:
        """A module that no other one called begins."""

    def forward_ends(self, module: Module, outputs: Any) -> None:
        """It ends with some outputs; None where it failed."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer begins to step."""

    def step_ends(self) -> None:
        """The phase that ends next is the last of a step of the training."""


@final
class PhaseHooks:
    """Watches modules and optimizers of this process, and tells a listener of their phases.

    Forward is the time in a module that no other one called. Backward begins when the gradient of such a
    module's output is known and ends with the backward; what is computed again during it belongs to it. A
    step ends when `optimizer.step()` does, or, where that is called by a hook of the backward, with the
    backward. Only the thread that installs the hooks is followed, and the backward that it starts.
    """

    def __init__(self, modules: Sequence[Module], listener: Listener) -> None:
        """Prepares to watch.

        Args:
            modules: The modules to watch; none for whatever module runs.
            listener: Who is told.
        """
        self._modules = modules
        self._listener = listener
        self._phases = [Phase.OTHER]
        self._outermost: Module | None = None
        self._task = -1
        self._has_stepped_inside = False
        self._has_closure = False
        self._removers: list[Callable[[], Any]] = []
        self._output_handles: list[RemovableHandle] = []
        self._thread = 0

    def install(self) -> None:
        """Begins to watch."""
        self._thread = threading.get_ident()
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        self._removers += [before.remove, after.remove]
        for module in self._modules:
            before = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            after = module.register_forward_hook(self._after_forward, always_call=True)
            self._removers += [before.remove, after.remove]
        if not self._modules:
            self._removers.append(_everywhere(self._before_forward, self._after_forward))

    def remove(self) -> None:
        """Stops watching; no hook stays."""
        while self._removers:
            self._removers.pop()()
        self._forget_outputs()

    def _enter(self, phase: Phase) -> None:
        self._phases.append(phase)
        self._listener.phase_begins(phase)

    def _leave(self, phase: Phase) -> None:
        """Ends a phase, and those inside of it, which a failure may have left open."""
        if phase in self._phases:
            del self._phases[self._phases.index(phase) :]
            self._listener.phase_begins(self._phases[-1])

    def _before_forward(self, module: Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling() or self._outermost is not None:
            return
        if _backward_task() != -1 or threading.get_ident() != self._thread:
            return
        self._leave_failed()
        self._outermost = module
        self._enter(Phase.FORWARD)
        self._listener.forward_begins(module, (args, kwargs))

    def _leave_failed(self) -> None:
        """Ends what a failure has left open, which is all inside of which no module can run."""
        for phase in (Phase.BACKWARD, Phase.FORWARD, *(() if self._has_closure else (Phase.OPTIMIZER,))):
            self._leave(phase)

    def _after_forward(self, module: Module, args: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._outermost:
            return
        if _backward_task() != -1 or threading.get_ident() != self._thread:
            return
        self._outermost = None
        self._listener.forward_ends(module, outputs)
        if outputs is None:  # it failed, and stays the phase in which it did until another one begins
            return
        self._leave(Phase.FORWARD)
        self._watch(outputs)

    def _watch(self, outputs: Any) -> None:
        if len(self._output_handles) > _MOST_HANDLES:
            self._forget_outputs()
        for tensor in _differentiable(outputs):
            handle = tensor.register_hook(self._in_backward)  # type: ignore[no-untyped-call]  # torch's own
            self._output_handles.append(handle)

    def _forget_outputs(self) -> None:
        while self._output_handles:
            self._output_handles.pop().remove()

    def _in_backward(self, gradient: Tensor) -> None:
        task = _backward_task()
        if task == self._task:
            return
        self._task = task
        self._enter(Phase.BACKWARD)
        # As DDP and FSDP learn of the end of a backward.
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._task = -1
        if self._has_stepped_inside:
            self._end_step()
        self._leave(Phase.BACKWARD)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _backward_task() != -1:
            return
        self._leave(Phase.OPTIMIZER)  # one that failed did not end
        self._has_closure = len(args) > 1 or bool(kwargs)
        self._enter(Phase.OPTIMIZER)
        self._listener.optimizer_begins(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _backward_task() != -1:
            self._has_stepped_inside = True
            return
        self._end_step()
        self._leave(Phase.OPTIMIZER)

    def _end_step(self) -> None:
        self._has_stepped_inside = False
        self._forget_outputs()
        self._listener.step_ends()


def _backward_task() -> int:
    """The number of the backward that this thread works for; -1 for none."""
    return torch._C._current_graph_task_id()


def _differentiable(outputs: Any) -> Iterator[Tensor]:
    leaves = (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs)
    for leaf in leaves:
        is_plain = isinstance(leaf, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        if is_plain and leaf.grad_fn is not None:
            yield leaf


def _everywhere(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Hooks on every module; returns what removes them.

    Under a key that is free rather than ever new ones: torch.compile guards on the keys of global hooks
    (torch 2.13), and would compile again under each monitor.
    """
    keys: Iterator[Any] = (f"anybatch phases {number}" for number in itertools.count())
    key = next(key for key in keys if key not in _global_forward_pre_hooks)
    _global_forward_pre_hooks[key] = before
    _global_forward_hooks[key] = after
    _global_forward_hooks_always_called[key] = True

    def remove() -> None:
        for hooks in (_global_forward_pre_hooks, _global_forward_hooks, _global_forward_hooks_always_called):
            hooks.pop(key, None)

    return remove
