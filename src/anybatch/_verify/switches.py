"""What can make micro-batches differ from the whole mini-batch, and how to switch each off."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module, RNNBase

from anybatch._verify.scene import Scene
from anybatch._verify.subject import Subject, standing_for


class Switch(enum.Enum):
    """Something that can be switched off. The value is what it is called."""

    BATCH_NORM = "BatchNorm"
    DROPOUT = "dropout"
    STATE = "kept state"
    INPUTS = "changed arguments"


@dataclass(frozen=True, eq=False)
class Wiring:
    """What the switches act on.

    Attributes:
        batch_norms: Layers that use the statistics of the batch.
        drawing: Modules that draw random numbers.
    """

    batch_norms: tuple[Module, ...] = ()
    drawing: tuple[Module, ...] = ()


def switched(subject: Subject, scene: Scene, off: Iterable[Switch], wiring: Wiring) -> Subject:
    """The call with some things switched off, for one run within `scene.undone()`."""
    off = set(off)
    if Switch.BATCH_NORM in off:
        for layer in wiring.batch_norms:
            _fix_statistics(layer, scene.leaves[0])
    if Switch.DROPOUT in off:
        for module in wiring.drawing:
            _stop_drawing(module)
    function = subject.function
    if Switch.STATE in off:
        function = _beginning_with(scene.again().restore_state, function)
    if Switch.INPUTS in off:
        function = _beginning_with(scene.restore_inputs, function)
    return replace(subject, function=function)


def _fix_statistics(layer: Any, leaf: Tensor) -> None:
    """Lets a layer use its running statistics, or 0 and 1, in the leaf's dtype, where it keeps none."""
    layer.training = False
    if layer.running_mean is None:
        like = next(layer.parameters(), leaf).detach()
        layer.running_mean = like.new_zeros(layer.num_features)
        layer.running_var = like.new_ones(layer.num_features)


def _stop_drawing(module: Module) -> None:
    if isinstance(module, RNNBase):
        module.dropout = 0.0  # cuDNN has no backward for these layers in eval mode
    else:
        module.training = False


def _beginning_with(restore: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets every call meet what the first one found."""

    def call(*args: Any, **kwargs: Any) -> Any:
        restore()
        return function(*args, **kwargs)

    return standing_for(function, call)
