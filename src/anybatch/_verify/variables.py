"""The variables with which a Python function works: of the functions around it, global ones, and defaults."""

import inspect
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any


def cells_of(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    """The variables of the functions around it that have a value, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if _is_filled(cell):
            yield name, cell


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises where the variable has no value yet
    except ValueError:
        return False
    return True


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The global variables that it names, or that functions inside it name."""
    found: dict[str, Any] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    return found


def defaults_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The default values of its parameters, by the parameter's name."""
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
