"""One run of the user's function on one piece: the arguments it gets, and what it returned."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anybatch.batch import join
from anybatch.errors import BatchError, LossError


@dataclass(frozen=True, eq=False)
class Bound:
    """A call of the user's function, of which some arguments are batches."""

    function: Callable[..., Any]
    arguments: inspect.BoundArguments
    batch_names: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @cached_property
    def batch(self) -> dict[str, Any]:
        """The named arguments.

        Raises:
            BatchError: One is missing.
        """
        present = self._by_name()
        missing = [name for name in self.batch_names if name not in present]
        if missing:
            raise BatchError(
                f"`apply`: every argument in `batch_names` is passed in the call, by keyword or position. "
                f"Got no {', '.join(missing)}; passed are {', '.join(present) or 'none'}."
            )
        return {name: present[name] for name in self.batch_names}

    def others(self) -> list[Any]:
        """The values of the arguments that are not cut."""
        return [value for name, value in self._by_name().items() if name not in self.batch_names]

    def run(self, batch: Mapping[str, Any]) -> Any:
        """Calls the function with other batches in place of the named arguments."""
        replaced: dict[str, Any] = {}
        for name, value in self.arguments.arguments.items():
            replaced[name] = batch.get(name, value)
            if self._kind(name) is inspect.Parameter.VAR_KEYWORD:
                replaced[name] = {key: batch.get(key, inner) for key, inner in value.items()}
        call = inspect.BoundArguments(self.arguments.signature, replaced)
        return self.function(*call.args, **call.kwargs)

    def _by_name(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.arguments.arguments.items():
            if self._kind(name) is inspect.Parameter.VAR_KEYWORD:
                found.update(value)
            else:
                found[name] = value
        return found

    def _kind(self, name: str) -> Any:
        return self.arguments.signature.parameters[name].kind


@dataclass(frozen=True, eq=False)
class Returned:
    """What the function returned for one piece.

    Attributes:
        names: The names of the losses; `(None,)` for a function that returns one loss.
        losses: 0-dim tensors.
        others: Whatever came after.
        has_others: Was it a tuple?
    """

    names: tuple[str | None, ...]
    losses: tuple[Tensor, ...]
    others: tuple[Any, ...]
    has_others: bool

    def settled(self, others: tuple[Any, ...]) -> "Returned":
        """The same without its graph, and with outputs that have none."""
        return Returned(self.names, (), others, self.has_others)


def returned(value: Any, function: str, *, needs_graph: bool) -> Returned:
    """Reads `loss`, `(loss, *others)`, or either with a dict of losses.

    Raises:
        LossError: There is no loss that backward could start from.
    """
    has_others = type(value) is tuple
    first, others = (value[0] if value else None, value[1:]) if has_others else (value, ())
    by_name = dict(first) if isinstance(first, Mapping) else {None: first}
    problems = [_problem(name, loss, needs_graph) for name, loss in by_name.items()]
    if not by_name or any(problems):
        facts = "; ".join(problem for problem in problems if problem) or "an empty dict"
        raise LossError(
            "`apply`: the function returns the loss (a 0-dim real tensor that requires grad, or a dict of "
            f"such), or a tuple that begins with it. Got from {function}: {facts}."
        )
    losses = tuple(loss for loss in by_name.values() if isinstance(loss, Tensor))
    return Returned(tuple(by_name), losses, tuple(others), has_others)


def _problem(name: str | None, loss: Any, needs_graph: bool) -> str | None:
    label = "" if name is None else f"{name!r}: "
    if not isinstance(loss, Tensor):
        return f"{label}{_described(loss)}"
    if loss.ndim and name is not None:
        return f"{label}a tensor of shape {tuple(loss.shape)}; of a model output return `.loss` first"
    if loss.ndim:
        return f"{label}a tensor of shape {tuple(loss.shape)}; reduce it to 0 dims, by a mean or a sum"
    if loss.is_complex() or not loss.is_floating_point():
        return f"{label}a tensor of dtype {loss.dtype}"
    if needs_graph and not loss.requires_grad:
        return f"{label}a tensor that does not require grad; was it detached, or are all parameters frozen?"
    return None


def _described(value: Any) -> str:
    return "nothing (None)" if value is None else f"{type(value).__name__}"


def answer(
    results: Sequence[Returned], losses: Sequence[Tensor], sizes: Sequence[int], home: torch.device | None
) -> Any:
    """What the caller gets: the losses of the whole mini-batch, and the pieces' outputs, joined."""
    first = results[0]
    other = next((result.names for result in results if result.names != first.names), None)
    if other is not None:
        raise LossError(
            f"`apply`: a dict of losses has the same keys for every micro-batch. Got {list(first.names)} and "
            f"{list(other)}. Return 0 * output.sum() for a loss that has nothing to count."
        )
    loss = losses[0] if first.names == (None,) else dict(zip(first.names, losses, strict=True))
    places = range(len(first.others))
    joined = [join([result.others[place] for result in results], sizes, home) for place in places]
    return (loss, *joined) if first.has_others else loss


class Dropped:
    """Stands for a saved tensor that was not kept."""


def drop_large(tensor: Tensor) -> Tensor | Dropped:
    """For a forward whose graph is read and never run: keeps constants and small results."""
    is_result = tensor.requires_grad and not tensor.is_leaf
    # Detached: a node that saved its own result would hold itself, which no garbage collector sees.
    return Dropped() if is_result and tensor.numel() > 4096 else tensor.detach()


def unpack(packed: Tensor | Dropped) -> Tensor:
    """A saved tensor, when backward asks for it.

    Raises:
        RuntimeError: It was not kept.
    """
    if isinstance(packed, Dropped):
        raise RuntimeError("this result was not kept")
    return packed


def eager() -> AbstractContextManager[None]:
    """A context in which compiled functions run as they are written, so that their graphs can be read.

    torch.compile takes seconds to import; what was never imported has compiled nothing.
    """
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def light_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which the graph keeps no large results."""
    return torch.autograd.graph.saved_tensors_hooks(drop_large, unpack)
