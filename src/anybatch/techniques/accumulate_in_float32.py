"""Gradients of 16-bit parameters, added up in float32 over as many backward runs as there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from anybatch.errors import TechniqueError
from anybatch.fit.sums import is_low, plus
from anybatch.techniques.technique import Setting, Technique


@final
@dataclass(frozen=True)
class AccumulateInFloat32(Technique):
    """Keeps a sum in float32 for the gradient of each parameter of less than 32 bits, between its steps.

    In bfloat16 a sum loses what is smaller than 1/256 of it, so that many small gradients are lost. Here
    every backward run adds to the sum in float32, and `.grad` is that sum, rounded once. One call of `apply`
    does this by itself for its pieces; this is for several calls before a step, and for plain loops.

    It costs memory: 4 bytes for each element of those parameters, see `cost_bytes`.

    Error: that of one rounding to the parameter's dtype, and of float32 sums, however many runs there are.

    Source: Micikevicius et al., "Mixed precision training", 2018, section 3.3.

    >>> AccumulateInFloat32().cost_bytes(nn.Linear(4, 2).bfloat16())
    40
    """

    source: ClassVar[str] = "Micikevicius et al., Mixed precision training, 2018"
    exactness: ClassVar[str] = "One rounding to the parameter's dtype, however many gradients are added."

    def cost_bytes(self, model: nn.Module) -> int:
        """What the sums take."""
        return sum(parameter.numel() * 4 for parameter in _low(model))

    def check(self, setting: Setting) -> None:
        if isinstance(setting.model, DistributedDataParallel):
            raise TechniqueError(
                "`AccumulateInFloat32`: DistributedDataParallel adds gradients up in buffers of its own. Got "
                "a model that is wrapped in it. Use it without, or float32 parameters under autocast."
            )
        if not _low(setting.model):
            raise TechniqueError(
                f"`AccumulateInFloat32`: there must be trained parameters of less than 32 bits. Got "
                f"{type(setting.model).__name__}, which has none. Leave it out."
            )

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        self.check(setting)
        with ExitStack() as stack:
            for parameter in _low(setting.model):
                sums = _Sum(parameter)
                _hook(stack, parameter.register_hook, sums.add)
                _hook(stack, parameter.register_post_accumulate_grad_hook, sums.put)
            yield


@final
class _Sum:
    """The gradient of one parameter so far, and the `.grad` that it was rounded to.

    A hook of the parameter adds each new gradient to the sum; one that runs after torch has accumulated puts
    the rounded sum where torch's own is. At the end of a call of `apply` both run with the call's gradient.
    """

    def __init__(self, parameter: Parameter) -> None:
        self._parameter = ref(parameter)
        self._total: Tensor | None = None
        self._rounded: ReferenceType[Tensor] | None = None
        self._version = 0
        self._has_more = False

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient to the sum."""
        parameter = self._parameter()
        if parameter is None or gradient.requires_grad:  # of which gradients will be taken
            return
        # Between the two hooks `apply` shows the call's own gradient; what was there before is put back.
        is_shown = parameter.grad is gradient
        before = self._last() if is_shown else parameter.grad
        self._total = plus(self._so_far(before), gradient, 1.0)
        self._has_more = True

    def put(self, parameter: Tensor) -> None:
        """Puts the sum where the gradient is."""
        gradient, total = parameter.grad, self._total
        if gradient is None or total is None or not self._has_more:
            return
        if gradient.layout == total.layout == torch.strided:
            gradient.copy_(total)
        else:
            parameter.grad = gradient = total.to(gradient.dtype)
        self._rounded, self._version, self._has_more = ref(gradient), gradient._version, False

    def _so_far(self, before: Tensor | None) -> Tensor | None:
        """None after `zero_grad`; what somebody has written to `.grad` since, where somebody has."""
        if before is None:
            return None
        is_ours = before is self._last() and before._version == self._version
        # A sum that was not put where the gradient is has one too many: `autograd.grad` runs hooks as well.
        return self._total if is_ours and not self._has_more else before.to(torch.float32)

    def _last(self) -> Tensor | None:
        return None if self._rounded is None else self._rounded()


def _hook(stack: ExitStack, register: Callable[..., Any], hook: Callable[[Tensor], None]) -> None:
    stack.callback(register(hook).remove)


def _low(model: nn.Module) -> list[Parameter]:
    return [
        each
        for each in model.parameters()
        if each.requires_grad and each.is_floating_point() and is_low(each.dtype)
    ]
