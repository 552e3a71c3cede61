"""The decorator: one call of the user's function becomes one call per micro-batch, and one backward each."""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler
from torch.nn import Module

from anybatch._call import Call
from anybatch._evaluate import evaluate
from anybatch._parallel import check_parallel
from anybatch._run import Bound
from anybatch._settings import Settings, refuse_later_options, settings
from anybatch._train import train
from anybatch.batch import BatchDim, Layout, lay_out
from anybatch.exact.pattern import Known
from anybatch.exact.weights import Weight
from anybatch.fit.reach import in_reach
from anybatch.memory.device import autocast_state, device_of

if TYPE_CHECKING:
    from anybatch.fit.auto import Auto


def apply(
    batch_names: Sequence[str],
    ub_size: "int | str | Auto" = 1,
    device: str | int | torch.device | None = None,
    device_ids: Sequence[int] | None = None,
    *,
    weight: Weight = "auto",
    on_inexact: str = "raise",
    batch_dim: BatchDim = 0,
    whole_batch_loss: Callable[..., Any] | None = None,
    batch_norm: str = "micro",
    scaler: GradScaler | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a training function in micro-batches, with the gradient of the whole mini-batch.

    The decorated function returns the loss, or `(loss, *others)`, and never calls `.backward()`: the call
    does, once per micro-batch, and leaves the gradient of the whole mini-batch in `.grad`, added to what
    was there. The loss may be a dict of losses, which are summed for backward.

    On the first call of each kind (other arguments, modes or graph) that needs more than one piece, the
    function is called a few more times to find out how its loss adds up (the probe); a function that keeps
    state of its own sees these calls.

    Args:
        batch_names: The arguments that hold the mini-batch, by name. Tensors, arrays, lists with one element
            per row, and containers of these.
        ub_size: The largest number of rows in a micro-batch, at least 1. Pieces are balanced: 10 rows with
            `ub_size=4` are cut 4, 3, 3. `"auto"`, or an `anybatch.Auto`, finds it from the memory that there
            is, and goes on with smaller pieces where memory runs out.
        device: Where micro-batches are sent; None for where the modules of the call are.
        device_ids: For a model in `nn.DataParallel`, the indexes of the accelerators that it is on. `ub_size`
            then counts per device, and `device` is the first of them if it is not given.
        weight: How pieces weigh. `"auto"` reads it from the loss's graph; `"rows"` and `"sum"` say that the
            loss is a mean over rows, or a sum; a function of named batch arguments returns what the loss
            of these rows is divided by (`lambda label: (label != -100).sum()`). A mapping gives a rule
            for each loss of a dict.
        on_inexact: What to do with a loss that does not add up: `"raise"`, `"warn"` or `"ignore"` (which
            leaves out the probe, too, and takes losses for what their graph looks like).
        batch_dim: The dim that holds rows: an int, or one per dotted path (`"x"`, `"batch.mask"`). None
            declares an entry that is shared by all rows; `"list"` a list with one element per row;
            `"balanced"` rows that differ in what they hold, of which all pieces are to hold nearly the same;
            the path of another entry, that rows lie one after another, with their lengths in the other.
        whole_batch_loss: Not available yet.
        batch_norm: What BatchNorm layers in training mode do. `"micro"`: all as in a mini-batch of the
            micro-batch's size, with a warning. `"deferred"`: the same, but running statistics are updated
            once, with those of the mini-batch. `"frozen"`: layers normalise with their running statistics
            and leave them alone, which is exact.
        scaler: A `torch.amp.GradScaler`. Backward runs on scaled losses, and gradients stay scaled, for
            its `unscale_` and `step`; the loss that the call returns is not scaled.

    Returns:
        A decorator. The decorated function returns the loss of the whole mini-batch, detached, or a tuple
        of it and the outputs: tensors with a row per row of the piece are concatenated, 0-dim tensors are
        stacked, anything else comes as a list with one entry per piece.

    Raises:
        ValueError: `ub_size`, `on_inexact`, `device` or `device_ids` is out of its range, at decoration; the
            model is not in `nn.DataParallel` on `device_ids`, at the call.
        BatchError: The named arguments can't be cut. Nothing ran.
        DoesNotFitError: With `ub_size="auto"`, not even the smallest micro-batch fits into memory.
        LossError: The function returned no loss, or ran backward itself.
        WeightError: `weight` is no weight.
        InexactError: The loss does not add up over pieces.

    Error:
        Exact up to rounding: 1e-10 of the largest gradient where everything is float64. Gradients of less
        than 32 bits are added up in float32, and those of float32 in blocks where there are more than 16
        pieces, which each takes 4 bytes per element.

    Source:
        Piao et al., "Enabling large batch size training for DNN models beyond the memory limit while
        maintaining performance", IEEE Access 2023, section III, for the contract.

    Example:
        >>> import torch, anybatch
        >>> model = torch.nn.Linear(3, 2)
        >>> @anybatch.apply(["x", "label"], ub_size=4)
        ... def train_fn(x, label):
        ...     return torch.nn.functional.cross_entropy(model(x), label)
        >>> loss = train_fn(x=torch.randn(10, 3), label=torch.tensor([0, 1] * 5))
        >>> loss.shape, model.weight.grad.shape
        (torch.Size([]), torch.Size([2, 3]))
    """
    refuse_later_options(whole_batch_loss, batch_norm)
    checked = settings(
        batch_names, ub_size, device, device_ids, weight, on_inexact, batch_dim, batch_norm, scaler
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        applied = Applied(function, checked)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return applied(*args, **kwargs)

        call.anybatch = applied  # type: ignore[attr-defined]  # for `options_of`
        return call

    return decorate


class Applied:
    """A function with its options, and what its calls have shown of it."""

    def __init__(self, function: Callable[..., Any], options: Settings) -> None:
        self.function = function
        self.options = options
        self._signature = inspect.signature(function.forward if isinstance(function, Module) else function)
        self._memories: dict[Hashable, Known] = {}
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs)
        for name in self.options.batch_names:
            parameter = self._signature.parameters.get(name)
            if parameter is not None and parameter.default is not parameter.empty:
                arguments.arguments.setdefault(name, parameter.default)
        bound = Bound(self.function, arguments, self.options.batch_names)
        layout = lay_out(bound.batch, self.options.batch_dim)
        reach = in_reach(self.function, bound.others())
        check_parallel(self.options.devices, reach.modules, bound.name)
        parameters = (leaf for module in reach.modules for leaf in module.parameters())
        device = self.options.device or device_of(chain(parameters, reach.leaves))
        kind = _kind(layout, reach.modules, bound.others(), device)
        memory = self._memories.setdefault(kind, Known())
        call = Call(bound, layout, self.options, kind, memory, reach, device, self._warned)
        return train(call) if torch.is_grad_enabled() else evaluate(call)


def _kind(
    layout: Layout, modules: Sequence[Module], others: Sequence[Any], device: torch.device | None
) -> Hashable:
    """What calls must have in common for what one has shown to hold for the other."""
    flags = tuple(value for value in others if value is None or isinstance(value, (bool, str)))
    modes = tuple(module.training for module in modules)
    return layout.structure, modes, autocast_state(device), torch.is_grad_enabled(), flags


def options_of(function: object) -> Applied | None:
    """The options of a decorated function; None for another."""
    found = getattr(function, "anybatch", None)
    return found if isinstance(found, Applied) else None
