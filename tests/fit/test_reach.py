"""What a function can name before it runs: modules, and leaves that belong to none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.fit.reach import in_reach

NAMED_GLOBALLY = nn.Linear(1, 1)


class Trainer:
    """Keeps its modules as users do."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.heads = {"a": nn.Linear(1, 1), "b": [nn.Linear(1, 1)]}

    def step(self, x: Tensor) -> Tensor:
        return self.model(x)


def names_a_global(x: Tensor) -> Tensor:
    return NAMED_GLOBALLY(x)


def names_nothing(x: Tensor) -> Tensor:
    return x


def test_reach_of_a_closure() -> None:
    """A module that the function closes over is in reach, once, without its children."""
    inner = nn.Linear(1, 1)
    outer = nn.Sequential(inner)
    assert in_reach(lambda x: outer(outer(x))).modules == (outer,)


def test_reach_of_globals() -> None:
    """Only those globals count that the function names."""
    assert in_reach(names_a_global).modules == (NAMED_GLOBALLY,)
    assert in_reach(names_nothing).modules == ()


def test_reach_of_defaults() -> None:
    """Modules given as default values are in reach, keyword-only ones too."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)

    def function(x: Tensor, model: nn.Module = first, *, head: nn.Module = second) -> Tensor:
        return head(model(x))

    assert set(in_reach(function).modules) == {first, second}


def test_reach_of_a_method() -> None:
    """A method reaches the modules of its object, in containers too."""
    trainer = Trainer()
    assert set(in_reach(trainer.step).modules) == {trainer.model, trainer.heads["a"], trainer.heads["b"][0]}


def test_reach_of_a_module() -> None:
    """A module is in its own reach, and a method of a module reaches it."""
    model = nn.Linear(1, 1)
    assert in_reach(model).modules == (model,)
    assert in_reach(model.forward).modules == (model,)


def test_reach_of_a_callable_object() -> None:
    """An object that is called reaches what a method of it reaches."""

    class Step(Trainer):
        def __call__(self, x: Tensor) -> Tensor:
            return self.model(x)

    step = Step()
    assert step.model in in_reach(step).modules


def test_reach_through_wrappers() -> None:
    """Partial application and `functools.wraps` hide nothing."""
    model, head = nn.Linear(1, 1), nn.Linear(1, 1)

    def function(x: Tensor, head: nn.Module) -> Tensor:
        return head(model(x))

    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args)

    assert set(in_reach(functools.partial(function, head=head)).modules) == {model, head}
    assert model in in_reach(wrapper).modules


def test_reach_of_arguments() -> None:
    """Arguments are in reach, also in lists, tuples and mappings."""
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    assert in_reach(names_nothing, [a, {"b": b}, [(c, a)]]).modules == (a, b, c)


def test_reach_ends_where_a_mapping_contains_itself() -> None:
    """A configuration that contains itself is walked through once."""
    config: dict[str, Any] = {"model": nn.Linear(1, 1)}
    config["self"] = config
    assert in_reach(names_nothing, [config]).modules == (config["model"],)


def test_leaves_in_reach() -> None:
    """Leaves that require grad are in reach where they are named; results and constants are not."""
    leaf, constant = torch.ones(2, requires_grad=True), torch.ones(2)
    result = leaf * 2
    assert in_reach(lambda x: x @ leaf + result + constant).leaves == (leaf,)
    assert in_reach(names_nothing, [[leaf, constant], {"w": leaf}]).leaves == (leaf,)


def test_parameters_in_reach_are_leaves() -> None:
    """A parameter that belongs to no module in reach is a leaf in reach."""
    weight = nn.Parameter(torch.ones(2))
    reach = in_reach(lambda x: x * weight)
    assert (reach.modules, reach.leaves) == ((), (weight,))


def test_large_containers_are_data() -> None:
    """A container of more than 64 entries is not looked through."""
    models = [nn.Linear(1, 1) for _ in range(64)]
    assert len(in_reach(names_nothing, [models]).modules) == 64
    assert in_reach(names_nothing, [[*models, None]]).modules == ()
    assert in_reach(names_nothing, [dict(enumerate([*models, None]))]).modules == ()


@pytest.mark.parametrize("compiles", [True, False])
def test_compiled_functions_are_told(compiles: bool) -> None:
    """A compiled function or module in reach is told apart from one that is not."""
    model = nn.Linear(1, 1)
    if compiles:
        model.compile(backend="eager")
    assert in_reach(lambda x: model(x)).is_compiled == compiles
    function = torch.compile(names_a_global, backend="eager") if compiles else names_a_global
    reach = in_reach(function)
    assert reach.is_compiled == compiles
    assert reach.modules == (NAMED_GLOBALLY,)
