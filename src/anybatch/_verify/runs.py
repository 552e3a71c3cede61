"""One run of the call, whole or in micro-batches, of which only numbers are kept.

Both run within `scene.undone()`. Gradients and hooks are taken away before, so that what is found in `.grad`
afterwards is this run's.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from anybatch._apply import Applied
from anybatch._run import returned
from anybatch._verify.scene import Scene
from anybatch._verify.subject import Subject, standing_for
from anybatch.batch import feed, input_gradients
from anybatch.errors import InexactWarning, LossError
from anybatch.exact import graph
from anybatch.exact.compiled import is_compiled
from anybatch.fit.modules import watching
from anybatch.fit.reach import in_reach


@dataclass(frozen=True, eq=False)
class Outcome:
    """The numbers of one run.

    Attributes:
        losses: By name; by None for a function that returns one loss.
        gradients: By the name of the parameter or batch entry; None where it got none.
        strays: Gradients of tensors that have no name, each with the tensor.
        unproved: What `apply` warned of.
    """

    losses: Mapping[str | None, float]
    gradients: Mapping[str, Tensor | None]
    strays: Mapping[int, tuple[Tensor, Tensor]]
    unproved: tuple[str, ...] = ()


@dataclass(eq=False)
class Seen:
    """What was seen on the way.

    Attributes:
        modules: Those that ran, in the order in which they first did.
        lowest: The dtype with the fewest digits in a graph.
    """

    modules: dict[Module, None] = field(default_factory=dict)
    lowest: torch.dtype = torch.float64


def whole(subject: Subject, scene: Scene, seen: Seen | None = None, seed: float = 1.0) -> Outcome:
    """Runs the call on all rows at once, in plain PyTorch; frozen layers are frozen here, too.

    Args:
        subject: The call.
        scene: What is in its reach.
        seen: Where to note what is seen on the way.
        seed: What backward starts from. Gradients are divided by it, and are the same but for their rounding.

    Raises:
        LossError: The function returns no loss, or ran backward itself.
        ValueError: A module runs for the first time, and has no parameters yet.
    """
    seen = seen or Seen()

    def enter(module: Module) -> None:
        _check_initialized(module)
        scene.add_module(module)
        seen.modules[module] = None

    scene.strip()
    layout, bound = subject.layout, subject.bound
    (piece,) = feed(layout, (layout.rows,), scene.device)
    with _norms(subject):
        with watching(enter):
            value = bound.run(piece.arguments)
        result = returned(value, bound.name, needs_graph=True)
        _check_bare(scene.leaves, bound.name)
        seen.lowest = _look_at(result.losses, scene, [leaf.leaf for leaf in piece.inputs])
        torch.autograd.backward(result.losses, [torch.full_like(loss, seed) for loss in result.losses])
    for entry, gradient in input_gradients(leaf.gradient() for leaf in piece.inputs):
        entry.grad = gradient
    losses = {name: float(loss.detach()) for name, loss in zip(result.names, result.losses, strict=True)}
    outcome = _outcome(losses, scene)
    return outcome if seed == 1.0 else _over(outcome, seed)


def _over(outcome: Outcome, seed: float) -> Outcome:
    """Gradients over the seed that they started from, without another rounding."""

    def over(gradient: Tensor) -> Tensor:
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        return gradient.detach().to(wide) / seed

    gradients = {name: None if value is None else over(value) for name, value in outcome.gradients.items()}
    strays = {key: (leaf, over(value)) for key, (leaf, value) in outcome.strays.items()}
    return replace(outcome, gradients=gradients, strays=strays)


@contextmanager
def _norms(subject: Subject) -> Iterator[None]:
    """A context in which BatchNorm layers do what they do in a call that is one piece."""
    reach = in_reach(subject.function, subject.bound.others())
    norms = subject.settings.norms(is_cut=False, is_compiled=is_compiled(subject.function))
    try:
        for module in {part for root in reach.modules for part in root.modules()}:
            norms.enter(module)
        yield
    finally:
        norms.close()


def in_pieces(subject: Subject, scene: Scene) -> Outcome:
    """Runs the call in micro-batches, by an `apply` that knows nothing of earlier calls.

    Raises:
        InexactError: The loss is found not to add up.
    """
    scene.strip()
    call = Applied(_looked_at(subject.function, scene), replace(subject.settings, scaler=None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InexactWarning)
        answer = call(*subject.arguments.args, **subject.arguments.kwargs)
    start = f"`apply`: {subject.bound.name}: "
    unproved = tuple(
        str(one.message).removeprefix(start).removesuffix(".")
        for one in caught
        if one.category is InexactWarning
    )
    for one in caught:
        if one.category is not InexactWarning:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    loss = answer[0] if type(answer) is tuple else answer
    by_name = loss if isinstance(loss, Mapping) else {None: loss}
    return _outcome({name: float(value) for name, value in by_name.items()}, scene, unproved)


def _looked_at(function: Callable[..., Any], scene: Scene) -> Callable[..., Any]:
    """The function, of whose losses the leaves are taken into the scene before they get gradients."""

    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        first = value[0] if type(value) is tuple and value else value
        losses = first.values() if isinstance(first, Mapping) else [first]
        _look_at([loss for loss in losses if isinstance(loss, Tensor) and loss.requires_grad], scene)
        return value

    return standing_for(function, call)


def _look_at(losses: Iterable[Tensor], scene: Scene, entries: Iterable[Tensor] = ()) -> torch.dtype:
    """Takes the leaves of some losses into the scene, except those that stand for batch entries.

    Returns:
        The dtype with the fewest digits in their graph.
    """
    seen, passed = graph.read(list(losses)), {id(entry) for entry in entries}
    for leaf in seen.leaves():
        if id(leaf) not in passed:
            scene.add_leaf(leaf)
    return graph.lowest_precision(seen.nodes)


def _check_initialized(module: Module) -> None:
    lazy = [name for name, leaf in module.named_parameters(recurse=False) if is_lazy(leaf)]
    if lazy:
        raise ValueError(
            "`verify`: a model has run before, for what a lazy module becomes can't be undone. Got "
            f"{type(module).__name__}, whose {' and '.join(lazy)} has no shape yet. Call the model once."
        )


def _check_bare(leaves: Iterable[Tensor], function: str) -> None:
    if any(leaf.grad is not None for leaf in leaves):
        raise LossError(
            "`verify`: the function returns the loss, and the call runs backward. "
            f"Got {function}, which changed gradients itself. Take `.backward()` out of it."
        )


def _outcome(losses: Mapping[Any, float], scene: Scene, unproved: tuple[str, ...] = ()) -> Outcome:
    named = {scene.names.of(leaf): leaf.grad for leaf in scene.leaves if leaf in scene.names}
    strays = {
        id(leaf): (leaf, leaf.grad)
        for leaf in scene.leaves
        if leaf not in scene.names and leaf.grad is not None
    }
    return Outcome(losses, named, strays, unproved)
