"""What an optimizer's step takes, asked of a shadow of it that has fakes for parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from anybatch.memory.symbolic import Fakes, run_symbolically

__all__ = ["OptimizerCost", "assumed_cost", "optimizer_cost", "shadow_of", "step_shadow"]


@final
@dataclass(frozen=True)
class OptimizerCost:
    """What the next step of an optimizer takes.

    Attributes:
        state_bytes: State that it makes because it is not there yet, and keeps.
        step_peak_bytes: The most that it takes beyond what is live before it: that state, and temporaries.
    """

    state_bytes: int
    step_peak_bytes: int


def optimizer_cost(optimizer: Optimizer) -> OptimizerCost:
    """What the next step takes, on all devices, where every parameter has a gradient of its own kind.

    A shadow of the optimizer makes the step: same class, groups and options, fakes for its parameters,
    gradients and state. The optimizer, its parameters and their gradients are not touched.

    Error: exact in bytes of tensors, where the step depends on no values.

    Raises:
        Untraceable: The step needs values, a closure or sparse gradients.
    """

    def step(fakes: Fakes) -> Optimizer:
        shadow = shadow_of(optimizer, fakes)
        for parameter in _parameters(shadow):
            fakes.tracker.leave_out(_with_gradient(parameter))
        step_shadow(shadow)
        return shadow

    trace = run_symbolically(step).trace
    return OptimizerCost(trace.end_bytes, trace.peak_bytes)


def assumed_cost(parameters: Iterable[Tensor]) -> OptimizerCost:
    """What the first step of Adam would take: for parameters whose optimizer is not known.

    Adam keeps two numbers per parameter, which few optimizers exceed. Its step goes over all parameters at
    once where that is torch's default for their device, and over one after another else.
    """
    trained = {id(each): each for each in parameters if each.requires_grad and each.is_leaf}
    if not trained:
        return OptimizerCost(0, 0)
    return optimizer_cost(torch.optim.Adam(list(trained.values())))


def shadow_of(optimizer: Optimizer, fakes: Fakes) -> Optimizer:
    """An optimizer of the same class, groups and state, over the fakes of its parameters.

    State and parameters do not count as memory of the run. Hooks do not come with it.
    """
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(_own_fields(optimizer))
    swapped: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in swapped:
            is_number = tensor.ndim == 0 and not tensor.requires_grad
            make: Callable[[Tensor], Tensor] = fakes.constant if is_number else _uncounted(fakes)
            swapped[id(tensor)] = make(tensor)
        return swapped[id(tensor)]

    shadow.param_groups = [_group_with(group, fake) for group in optimizer.param_groups]
    shadow.state = defaultdict(dict)
    for key, state in optimizer.state.items():
        shadow.state[fake(key) if isinstance(key, Tensor) else key] = _swapped_in(state, fake)
    return shadow


def step_shadow(shadow: Optimizer) -> None:
    """Steps a shadow without the hooks that everybody's optimizers share."""
    step: Any = type(shadow).step
    bare = step.__wrapped__ if getattr(step, "hooked", False) else step
    bare(shadow)


def _own_fields(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes but hooks, and methods that are bound to it."""
    fields = {
        name: OrderedDict() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if getattr(value, "__self__", None) is not optimizer
    }
    for name in ("param_groups", "state"):
        del fields[name]
    return fields


def _group_with(group: dict[str, Any], fake: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    copied: dict[str, Any] = _swapped_in(group, fake)
    if "foreach" in group and group["foreach"] is None and not group.get("fused"):
        # A fake is none of the types for which torch goes over all parameters at once.
        differentiable = bool(group.get("differentiable"))
        copied["foreach"] = _default_to_fused_or_foreach(group["params"], differentiable)[1]
    return copied


def _swapped_in(value: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fake(value)
    if type(value) in (dict, OrderedDict, defaultdict):
        return {key: _swapped_in(each, fake) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_swapped_in(each, fake) for each in value)
    return value


def _uncounted(fakes: Fakes) -> Callable[[Tensor], Tensor]:
    return lambda tensor: fakes.fake(tensor, counts=False)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_gradient(parameter: Tensor) -> list[Tensor]:
    if not parameter.requires_grad:
        return []
    with torch.no_grad():
        parameter.grad = torch.empty_like(parameter)
    return [parameter.grad]
