"""A `torch.amp.GradScaler` in a call: backward starts from scaled losses; the caller sees unscaled ones."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import Node

from anybatch.errors import LossError
from anybatch.exact.graph import node_of


class LossScaler:
    """Scales the losses of a call. Unscaling, stepping and updating stay with the caller."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        # Scale and growth are made at first use: there is no public way back from there (torch 2.13).
        self._before = {} if self._scaler is None else {k: _Kept.of(v) for k, v in vars(self._scaler).items()}

    @property
    def is_on(self) -> bool:
        return self._scaler is not None

    def scaled(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """The losses times the scale: in float32, where they have fewer digits."""
        return list(losses) if self._scaler is None else [self._scaler.scale(loss) for loss in losses]

    def check_unscaled(self, losses: Sequence[Tensor], function: str) -> None:
        """Looks for a multiplication by the scale near the losses: of these, or of the losses of rows.

        Raises:
            LossError: There is one.
        """
        if self._scaler is None:
            return
        for loss in losses:
            one = torch.ones((), device=loss.device, requires_grad=True)
            (scale,) = _factors(node_of(self._scaler.scale(one)))
            nodes = _scalar_nodes(node_of(loss))
            if any(factor.data_ptr() == scale.data_ptr() for node in nodes for factor in _factors(node)):
                raise LossError(
                    "`apply`: with `scaler=` the function returns the loss as it is, and the call scales it. "
                    f"Got {function}, which scaled it itself. Take `scaler.scale` out of its return value."
                )

    def restore(self) -> None:
        """Puts the scaler's state back."""
        if self._scaler is not None:
            before = {name: kept.restored() for name, kept in self._before.items()}
            vars(self._scaler).clear()
            vars(self._scaler).update(before)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A value of the scaler's, and a copy of it; of a tensor also how often it was written to."""

    value: Any
    copy: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> "_Kept":
        return cls(value, copy.deepcopy(value), value._version if isinstance(value, Tensor) else 0)

    def restored(self) -> Any:
        if not isinstance(self.value, Tensor):
            return self.copy
        # What did not change is left alone: a graph may have saved it.
        with torch.no_grad():
            return self.value if self.value._version == self.version else self.value.copy_(self.copy)


def _scalar_nodes(root: Node) -> Iterator[Node]:
    """The nodes below that give single numbers, and those that these are directly made of."""
    seen: set[Node] = set()
    waiting: list[Node | None] = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not any(len(one.shape) for one in node._input_metadata):
            waiting += [below for below, _ in node.next_functions]


def _factors(node: Node) -> list[Tensor]:
    """The tensors that a multiplication has saved."""
    if node.name() != "MulBackward0":
        return []
    try:
        saved = [getattr(node, "_saved_self", None), getattr(node, "_saved_other", None)]
    except RuntimeError:  # changed in place since: nothing that a scaler does
        return []
    return [factor for factor in saved if isinstance(factor, Tensor)]
