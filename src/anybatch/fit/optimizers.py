"""The optimizers that step with a function's gradients: given, or seen when they first step."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from anybatch.memory.shadow import OptimizerCost, assumed_cost, optimizer_cost
from anybatch.memory.symbolic import Untraceable

__all__ = ["Optimizers"]


@final
class Optimizers:
    """Optimizers, held weakly; those that were not given are recognised by what they step.

    torch tells of every step of every optimizer through one hook, which is set while someone is looked for.
    """

    def __init__(self, given: Optimizer | None) -> None:
        self.is_given = given is not None
        self._costs: dict[Hashable, OptimizerCost] = {}
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if given is None else [given])
        self._wanted: dict[int, weakref.ref[Tensor]] = {}
        self._stop_looking: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[type["Optimizers"], tuple[None]]:
        """A copy, in another process say, looks for its optimizers anew."""
        return Optimizers, (None,)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._known)

    def cost(self, parameters: Sequence[Tensor]) -> OptimizerCost:
        """What the next steps take with these parameters' gradients; as Adam's until one has been seen."""
        known = list(self)
        if not known:
            return self._remembered(sum(map(Tensor.numel, parameters)), partial(_assumed_cost, parameters))
        costs = [self._remembered((id(one), len(one.state)), partial(_cost_of, one)) for one in known]
        return OptimizerCost(
            sum(cost.state_bytes for cost in costs), max(cost.step_peak_bytes for cost in costs)
        )

    def _remembered(self, key: Hashable, find: Callable[[], OptimizerCost]) -> OptimizerCost:
        """What was found before: a step makes no state that is there already."""
        if key not in self._costs:
            self._costs[key] = find()
        return self._costs[key]

    def look_for(self, parameters: Iterable[Tensor]) -> None:
        """Looks out for optimizers that step one of the parameters, until each has had a step."""
        if self.is_given:
            return
        known = {id(parameter) for optimizer in self for parameter in _parameters(optimizer)}
        self._wanted = {id(one): weakref.ref(one) for one in parameters if id(one) not in known}
        if self._wanted and self._stop_looking is None:
            # Through a weak reference: the hook must not keep this alive.
            handle = register_optimizer_step_post_hook(_Seen(weakref.ref(self)))
            self._stop_looking = handle.remove
            weakref.finalize(self, handle.remove)

    def see(self, optimizer: Optimizer) -> None:
        """Takes note of an optimizer that has stepped."""
        stepped = {id(parameter): parameter for parameter in _parameters(optimizer)}
        found = [key for key, wanted in self._wanted.items() if wanted() is stepped.get(key, self)]
        if found:
            self._known.add(optimizer)
        for key in found:
            del self._wanted[key]
        if not self._wanted and self._stop_looking is not None:
            self._stop_looking()
            self._stop_looking = None


class _Seen:
    """What torch calls after a step."""

    def __init__(self, optimizers: weakref.ref[Optimizers]) -> None:
        self._optimizers = optimizers

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizers = self._optimizers()
        if optimizers is not None:
            optimizers.see(optimizer)


def _cost_of(optimizer: Optimizer) -> OptimizerCost:
    """The optimizer's cost; where a shadow can't tell, that of Adam, or nothing once there is state."""
    try:
        return optimizer_cost(optimizer)
    except Untraceable:
        return OptimizerCost(0, 0) if optimizer.state else _assumed_cost(_parameters(optimizer))


def _assumed_cost(parameters: Sequence[Tensor]) -> OptimizerCost:
    """That of Adam; its two numbers per parameter where a shadow can't tell."""
    try:
        return assumed_cost(parameters)
    except (Untraceable, MemoryError):
        state_bytes = 2 * sum(one.numel() * one.element_size() for one in parameters)
        return OptimizerCost(state_bytes, state_bytes)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
