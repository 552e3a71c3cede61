"""The call that is verified: a decorated function and what it is called with."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from anybatch._apply import options_of
from anybatch._run import Bound
from anybatch._settings import Settings
from anybatch.batch import Layout, balanced, lay_out
from anybatch.batch.containers import container_of
from anybatch.batch.leaves import Array, holds_only_scalars, is_array


@dataclass(frozen=True, eq=False)
class Subject:
    """A call of a decorated function.

    Attributes:
        function: The user's, undecorated.
        settings: The options of `apply`.
        arguments: What it is called with.
    """

    function: Callable[..., Any]
    settings: Settings
    arguments: inspect.BoundArguments

    @property
    def bound(self) -> Bound:
        return Bound(self.function, self.arguments, self.settings.batch_names)

    @property
    def layout(self) -> Layout:
        return lay_out(self.bound.batch, self.settings.batch_dim)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each piece."""
        assert isinstance(self.settings.ub_size, int)
        layout = self.layout
        return balanced(layout.rows, self.settings.ub_size * self.settings.shares, layout.amounts)

    def by_name(self) -> dict[str, Any]:
        """Every argument by its name, those of `**kwargs` among them."""
        found: dict[str, Any] = {}
        for name, value in self.arguments.arguments.items():
            is_many = _kind_of(self.arguments, name) is inspect.Parameter.VAR_KEYWORD
            found.update(value if is_many else {name: value})
        return found

    def mapped(self, change: Callable[[str, Array], Any]) -> "Subject":
        """The same with other tensors and arrays.

        Args:
            change: Given the name of an argument, and a tensor or array in it, what takes its place; asked
                once for each.
        """
        known: dict[int, Any] = {}
        changed = OrderedDict(self.arguments.arguments)
        for name, value in changed.items():
            if _kind_of(self.arguments, name) is inspect.Parameter.VAR_KEYWORD:
                changed[name] = {key: _mapped(inner, key, change, known) for key, inner in value.items()}
            else:
                changed[name] = _mapped(value, name, change, known)
        return replace(self, arguments=inspect.BoundArguments(self.arguments.signature, changed))


def subject_of(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Subject:
    """Reads a call of a decorated function.

    Raises:
        TypeError: The function is not decorated, or can't be called so.
    """
    applied = options_of(step)
    if applied is None:
        name = getattr(step, "__qualname__", type(step).__qualname__)
        raise TypeError(
            f"`verify`: the first argument is a function decorated with `anybatch.apply`. Got {name}, which "
            'is not. Decorate it, as in `anybatch.apply(["x", "label"], ub_size=32)(train_fn)`.'
        )
    if inspect.ismethod(step):
        args = (step.__self__, *args)
    arguments = _signature_of(applied.function).bind(*args, **kwargs)
    for name in applied.options.batch_names:
        parameter = arguments.signature.parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            arguments.arguments.setdefault(name, parameter.default)
    return _of_a_size(Subject(applied.function, applied.options, arguments))


def _of_a_size(subject: Subject) -> Subject:
    """The call with a size in place of a way to find one: half of the mini-batch, so that it is cut."""
    if isinstance(subject.settings.ub_size, int):
        return subject
    half_rows = -(-subject.layout.rows // (2 * subject.settings.shares))
    return replace(subject, settings=replace(subject.settings, ub_size=half_rows))


def standing_for(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a call that wraps the user's function look like it, with its name, variables and parameters."""
    functools.update_wrapper(call, function)
    call.__signature__ = _signature_of(function)  # type: ignore[attr-defined]
    return call


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, Module) else function)


def with_leaves(subject: Subject) -> Subject:
    """The call with a leaf for each batch entry that requires grad, and without inference tensors.

    The graph above such an entry is the caller's, and survives. Gradients at the entry tell as much.
    """
    batch_names = subject.settings.batch_names

    def change(name: str, value: Array) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_inference():
            return value.clone()
        is_entry = name in batch_names and value.requires_grad
        return value.detach().requires_grad_() if is_entry else value

    return subject.mapped(change)


def in_double(subject: Subject) -> Subject:
    """The call with all that is floating in its arguments in float64."""

    def change(_name: str, value: Array) -> Any:
        if isinstance(value, Tensor):
            return _wide(value)
        return value.astype(np.float64) if value.dtype.kind == "f" else value

    return subject.mapped(change)


def _wide(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _mapped(value: Any, name: str, change: Callable[[str, Array], Any], known: dict[int, Any]) -> Any:
    if is_array(value):
        if id(value) not in known:
            known[id(value)] = change(name, value)
        return known[id(value)]
    container = None if isinstance(value, Module) else container_of(value)
    if container is None or (container.is_list and holds_only_scalars(value)):
        return value
    old = [child for _, child in container.children(value)]
    new = [_mapped(child, name, change, known) for child in old]
    is_same = all(before is after for before, after in zip(old, new, strict=True))
    return value if is_same else container.rebuild(value, new)


def _kind_of(arguments: inspect.BoundArguments, name: str) -> Any:
    return arguments.signature.parameters[name].kind
