"""What a call can reach and change: its arguments, its function's variables, modules and what they hold.

From the arguments, the function's closure, defaults and the globals that it names the way goes on into
modules, containers, and functions and objects of the user's own file, nearest first. What lies beyond (a
file, a logger, objects of other libraries) can't be put back.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from anybatch._verify.kept import (
    SEQUENCES,
    Kept,
    KeptCell,
    KeptItems,
    KeptMode,
    KeptNamespace,
    KeptState,
    kept_generator,
)
from anybatch._verify.kept_values import KeptArray, KeptLeaf, KeptTensor, can_keep
from anybatch._verify.names import Names
from anybatch._verify.variables import cells_of, defaults_of, globals_of
from anybatch.batch.containers import container_of
from anybatch.batch.leaves import SCALARS, holds_only_scalars

_OF_MODULES = ("_parameters", "_buffers", "_modules")

Named = tuple[str, Any]


class Surroundings:
    """Follows values, and keeps what can change.

    Attributes:
        inputs: What the caller passed: tensors, arrays and containers.
        state: What the function and its modules hold.
        leaves: Gradients, hooks, and whether tensors require grad.
        strays: The same of tensors that were found on the way and have no name.
        modes: Whether modules train.
        generators: Random generators of the user's own.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], names: Names) -> None:
        self.inputs: list[Kept] = []
        self.state: list[Kept] = []
        self.leaves: list[KeptLeaf] = []
        self.strays: list[KeptLeaf] = []
        self.modes: list[Kept] = []
        self.generators: list[KeptState] = []
        self._names = names
        self._home = getattr(function, "__module__", None)
        self._seen: dict[int, Any] = {}
        self._waiting: deque[Named] = deque()
        self._into = self.inputs
        others = self._keep_inputs(arguments.items())
        self._into = self.state
        self._see_variables(others)
        self._see_function(function)
        self._follow()

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._seen

    def add_model(self, module: Module, name: str) -> None:
        """Keeps a model."""
        self._see_variables([(name, module)])
        self._follow()

    def add_stray(self, tensor: Tensor) -> list[KeptLeaf]:
        """Keeps a tensor that has no name, as long as it lives; returns what was not kept yet."""
        if any(leaf.tensor is tensor for leaf in self.strays):
            return []
        new = KeptLeaf("a tensor", tensor)
        self.strays = [*(leaf for leaf in self.strays if leaf.tensor is not None), new]
        return [new]

    def _keep_inputs(self, arguments: Iterable[Named]) -> list[Named]:
        """Keeps tensors, arrays and containers; returns the rest, which is state."""
        others: list[Named] = []
        waiting = deque(arguments)
        while waiting:
            name, value = waiting.popleft()
            if isinstance(value, SCALARS):
                continue
            if isinstance(value, Tensor | np.ndarray):
                self._visit(name, value)
            elif isinstance(value, Module) or not _is_container(value):
                others.append((name, value))
            elif self._is_new(value):
                self._keep_items(name, value)
                waiting += _children(name, value)
        return others

    def _see_variables(self, variables: Iterable[Named]) -> None:
        """Lets values wait for their turn. A model's parts are named without the variable that holds it."""
        for name, value in variables:
            if isinstance(value, Module) and value not in self:
                self._names.add_root(name)
            self._waiting.append((name, value))

    def _follow(self) -> None:
        while self._waiting:
            self._visit(*self._waiting.popleft())

    def _is_new(self, value: Any) -> bool:
        if value in self:
            return False
        self._seen[id(value)] = value
        return True

    def _visit(self, name: str, value: Any) -> None:
        """Keeps a value, once, and lets what it leads to wait."""
        if isinstance(value, SCALARS) or not self._is_new(value):
            return
        generator = kept_generator(name, value)
        if generator is not None:
            self.generators.append(generator)
        elif isinstance(value, Tensor):
            self._keep_tensor(name, value)
        elif isinstance(value, np.ndarray):
            self._keep_array(name, value)
        elif isinstance(value, Module):
            self._visit_module(name, value)
        elif _is_container(value):
            self._keep_items(name, value)
            self._see_variables(_children(name, value))
        elif callable(value) and not inspect.isclass(value):
            self._visit_callable(name, value)
        elif self._is_of_users_file(type(value)):
            self._visit_object(name, value)

    def _keep_tensor(self, name: str, tensor: Tensor) -> None:
        self._names.add(tensor, name)
        self.leaves.append(KeptLeaf(name, tensor))
        if can_keep(tensor):
            self._into.append(KeptTensor(name, tensor))

    def _keep_array(self, name: str, array: "np.ndarray[Any, Any]") -> None:
        if array.flags.writeable and not array.dtype.hasobject:
            self._into.append(KeptArray(name, array))

    def _keep_items(self, name: str, value: Any) -> None:
        if isinstance(value, SEQUENCES):
            self._into.append(KeptItems(name, value))
        elif isinstance(value, dict):
            self._into.append(KeptNamespace(name, value))
        if hasattr(value, "__dict__"):
            self._into.append(KeptNamespace(name, vars(value)))

    def _visit_module(self, name: str, module: Module) -> None:
        self._names.add(module, name)
        self.modes.append(KeptMode(name, module))
        attributes = vars(module)
        self.state.append(KeptNamespace(name, attributes, leave_out=("training",)))
        for key, value in attributes.items():
            if key in _OF_MODULES:
                self.state.append(KeptNamespace(name, value))
                self._waiting += ((f"{name}.{inner}", child) for inner, child in value.items())
            else:
                self._waiting.append((f"{name}.{key}", value))

    def _visit_object(self, name: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._into.append(KeptNamespace(name, attributes))
            self._see_variables((f"{name}.{key}", child) for key, child in attributes.items())

    def _is_of_users_file(self, value: Any) -> bool:
        return getattr(value, "__module__", None) == self._home

    def _visit_callable(self, name: str, value: Any) -> None:
        is_users = inspect.isfunction(value) and self._is_of_users_file(value)
        if is_users or isinstance(value, functools.partial) or inspect.ismethod(value):
            self._see_function(value)
        elif self._is_of_users_file(type(value)):
            self._visit_object(name, value)

    def _see_function(self, function: Any) -> None:
        """Lets what a function, or any callable, works with wait."""
        if isinstance(function, functools.partial):
            numbered = ((f"argument {place}", value) for place, value in enumerate(function.args))
            self._see_variables((*numbered, *function.keywords.items()))
            self._see_function(function.func)
        elif inspect.ismethod(function):
            self._see_owner(function.__self__)
            self._see_function(function.__func__)
        elif inspect.isfunction(function):
            self._see_variables_of(function)
        else:
            self._see_variables([(type(function).__name__, function)])

    def _see_owner(self, owner: Any) -> None:
        if isinstance(owner, Module):
            self._see_variables([("self", owner)])
        elif not inspect.isclass(owner) and self._is_new(owner):
            self._visit_object("self", owner)

    def _see_variables_of(self, function: Any) -> None:
        self._seen[id(function)] = function
        for name, cell in cells_of(function):
            if self._is_new(cell):
                self.state.append(KeptCell(name, cell))
                self._see_variables([(name, cell.cell_contents)])
        named = globals_of(function)
        self.state.append(KeptNamespace("", function.__globals__, keys=named))
        self._see_variables((*named.items(), *defaults_of(function)))
        self._visit_object(function.__name__, function)


def _is_container(value: Any) -> bool:
    return isinstance(value, SEQUENCES) or container_of(value) is not None


def _children(name: str, value: Any) -> Iterator[Named]:
    if isinstance(value, list | tuple | set) and holds_only_scalars(value):
        return
    container = container_of(value)
    children = container.children(value) if container is not None else enumerate(value)
    yield from ((f"{name}.{key}", child) for key, child in children)
