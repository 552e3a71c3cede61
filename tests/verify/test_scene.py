"""What a scene reaches, how it names it, and that it puts it back."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch._verify.scene import Part, Scene
from anybatch._verify.subject import subject_of

COUNT = 0
TABLE = {"a": [1, 2]}


def _scene(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Scene:
    """The scene of a call whose first argument `x` is the batch."""
    step = anybatch.apply(["x"], ub_size=2)(function)
    return Scene(subject_of(step, (torch.zeros(4, 2), *args), kwargs))


def _change(container: Any) -> None:
    if isinstance(container, dict):
        container["new"] = 1
        container.pop("a", None)
    elif isinstance(container, set):
        container.add(7)
    else:
        container.append(7)


CONTAINERS = {
    "list": [1, 2],
    "set": {1, 2},
    "deque": deque([1, 2], maxlen=2),
    "dict": {"a": 1, "b": 2},
    "ordered dict": OrderedDict(a=1, b=2),
    "default dict": defaultdict(list, a=[1]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers(kind: str) -> None:
    """What a container holds is kept, and put back into the same container."""
    held = CONTAINERS[kind]
    before = copy.copy(held)
    scene = _scene(lambda x: held)
    _change(held)
    assert scene.changed_state()[0].startswith("held")
    scene.restore()
    assert held == before
    assert scene.changed_state() == []


def test_containers_in_containers() -> None:
    """What is deep inside is kept, too, and named by the way to it."""
    held = {"rows": [np.zeros(3), (torch.zeros(2), {"deep": [1]})]}
    scene = _scene(lambda x: held)
    held["rows"][0][1] = 5
    held["rows"][1][0][1] = 5
    held["rows"][1][1]["deep"].append(2)
    assert scene.changed_state() == ["held.rows.0", "held.rows.1.0", "held.rows.1.1.deep"]
    scene.restore()
    assert held["rows"][0].tolist() == [0, 0, 0]
    assert held["rows"][1][0].tolist() == [0, 0]
    assert held["rows"][1][1] == {"deep": [1]}


def test_variables() -> None:
    """Global and enclosing variables, defaults and attributes of the function are put back."""
    calls, unset = 0, None

    def function(x: Tensor, seen: list[int] = [], *, last: dict[str, int] = {}) -> None:  # noqa: B006
        nonlocal calls, unset
        global COUNT
        calls, unset, COUNT = calls + 1, x, COUNT + 1
        seen.append(1)
        last["a"] = 1
        TABLE["a"].append(3)
        function.calls = 1  # type: ignore[attr-defined]

    scene = _scene(function)
    function(torch.ones(1))
    expected = ["COUNT", "TABLE.a", "calls", "function.calls", "last.a", "seen", "unset"]
    assert sorted(scene.changed_state()) == expected
    scene.restore()
    assert (calls, unset, COUNT, TABLE) == (0, None, 0, {"a": [1, 2]})
    assert function.__defaults__ == ([],)
    assert function.__kwdefaults__ == {"last": {}}
    assert not hasattr(function, "calls")


def _helper(x: Tensor) -> None:
    global COUNT
    COUNT += 1


def test_functions_of_the_same_file() -> None:
    """What a function of the same file, called by the function, works with is reached, also in a partial."""
    scene = _scene(lambda x: _helper(x))
    _helper(torch.ones(1))
    assert scene.changed_state() == ["COUNT"]
    scene.restore()
    held = [1]
    scene = _scene(functools.partial(lambda held, x: held, held))
    held.append(2)
    assert scene.changed_state() == ["argument 0"]


def test_globals_of_functions_inside() -> None:
    """Global variables that only a function inside of the function names are reached."""
    global COUNT

    def function(x: Tensor) -> Any:
        return lambda: [COUNT for _ in range(2)]

    scene = _scene(function)
    COUNT += 1
    assert scene.changed_state() == ["COUNT"]
    scene.restore()


@dataclass
class Meter:
    """An object of the user's file."""

    total: float = 0.0


def test_objects_of_the_same_file() -> None:
    """Attributes of an object whose class is in the function's file are put back."""
    meter = Meter()
    scene = _scene(lambda x: meter)
    meter.total = 3.0
    assert scene.changed_state() == ["meter.total"]
    scene.restore()
    assert meter.total == 0.0


def test_arguments_and_state_are_told_apart() -> None:
    """Tensors and containers that are passed are inputs; a model that is passed is state."""
    model, seen = nn.Linear(2, 2), [1]

    def function(x: Tensor, model: nn.Module, **others: Any) -> None: ...

    scene = _scene(function, model, seen=seen, table=np.zeros(2))
    seen.append(2)
    model.weight.data.zero_()
    assert scene.changed_inputs() == ["seen"]
    assert scene.changed_state() == ["weight"]
    scene.restore_inputs()
    assert seen == [1]
    assert scene.changed_state() == ["weight"]
    scene.restore()
    assert model.weight.abs().max() > 0


def test_tensors_by_bits() -> None:
    """A change through `.data`, one of sign of zero, and other memory are seen and undone; versions stay."""
    weight, other = torch.zeros(3), torch.full((3,), torch.nan)
    memory = weight.data_ptr()
    scene = _scene(lambda x: (weight, other))
    assert scene.changed_state() == []
    weight.data.neg_()
    other.data = torch.ones(2, dtype=torch.float64)
    assert sorted(scene.changed_state()) == ["other", "weight"]
    scene.restore()
    assert not torch.signbit(weight).any()
    assert other.isnan().all()
    assert other.shape == (3,)
    weight.data = torch.zeros(3)
    scene.restore()
    assert weight.data_ptr() == memory
    assert weight._version == other._version == 0


def test_unwritable_values_are_passed_over() -> None:
    """Read-only arrays, arrays of objects, expanded, sparse, inference and lazy tensors do no harm."""
    array = np.zeros(3)
    array.flags.writeable = False
    with torch.inference_mode():
        inference = torch.zeros(2)
    held = [
        array,
        np.array([None, "a"]),
        torch.zeros(1).expand(4),
        torch.eye(2).to_sparse(),
        inference,
        nn.LazyLinear(3),
        torch.zeros(2, device="meta"),
    ]
    scene = _scene(lambda x: held)
    assert scene.changed_state() == []
    scene.restore()


def test_modules() -> None:
    """Buffers, parameters, plain attributes, modes and hooks of modules are put back."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.table = torch.zeros(3)
    model.past = [1]
    weight = model[0].weight
    scene = _scene(lambda x: model)
    model.table.add_(1)
    model.past.append(2)
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    model[1].running_mean = torch.ones(2)
    model[1].extra = 3
    model.eval()
    model[0].register_forward_hook(lambda *_: None)
    changed = scene.changed_state()
    assert {"table", "past", "0.weight", "1.running_mean", "1.extra"} <= set(changed)
    scene.restore()
    assert scene.changed_state() == []
    assert model[0].weight is weight
    assert model[1].running_mean.tolist() == [0, 0]
    assert not hasattr(model[1], "extra")
    assert all(module.training for module in model.modules())
    assert not model[0]._forward_hooks


def test_module_that_is_out_of_reach() -> None:
    """A module that is taken in later is put back like the others, and stripped like them."""
    model = nn.Linear(2, 2)
    model.weight.grad = gradient = torch.ones(2, 2)
    scene = _scene(lambda x: None)
    scene.strip()
    scene.add_module(model)
    assert model.weight.grad is None
    model.weight.data.zero_()
    assert scene.changed_state() == ["weight"]
    scene.restore()
    assert model.weight.grad is gradient
    assert model.weight.abs().max() > 0


def test_state_is_put_back_without_modes() -> None:
    """Modes are no state: they stay when state alone is put back."""
    model = nn.Linear(2, 2)
    scene = _scene(lambda x: model)
    model.eval()
    assert scene.changed_state() == []
    scene.restore_state()
    assert not model.training
    scene.restore()
    assert model.training


def test_one_part_can_be_left_as_it_is() -> None:
    """State, inputs and random state can each be left while the others are put back."""
    weight, own, past = torch.zeros(2), torch.Generator().manual_seed(3), [1]

    def function(x: Tensor, past: list[int]) -> Any:
        return weight, own

    scene = _scene(function, past)
    begin = torch.get_rng_state()

    def change() -> None:
        weight.data.fill_(1)
        past.append(2)
        torch.randn(1), torch.randn(1, generator=own)

    def moved() -> set[str]:
        return {*scene.changed_state(), *scene.changed_inputs(), *scene.moved_generators()}

    for part, left in {Part.STATE: {"weight"}, Part.INPUTS: {"past"}, Part.RANDOM: {"torch", "own"}}.items():
        change()
        assert moved() == {"weight", "past", "torch", "own"}
        scene.restore_all_but(part)
        assert moved() == left
        scene.restore()
    assert torch.equal(torch.get_rng_state(), begin)


def test_names_of_parts_of_models() -> None:
    """A part is named as in its model; where two models have such a part, by its variable too."""
    encoder, decoder = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    decoder[1].weight = decoder[0].weight
    names = _scene(lambda x: (encoder, decoder)).names
    assert names.of(decoder[0].weight) == "0.weight"
    assert names.of(decoder[1].bias) == "1.bias"
    assert names.of(encoder.bias) == "bias"
    assert names.of(decoder[1]) == "1"
    assert names.of(encoder) == "encoder"
    twin = nn.Linear(2, 2)
    names = _scene(lambda x: (encoder, twin)).names
    assert names.of(encoder.weight) == "encoder.weight"
    assert names.of(twin.weight) == "twin.weight"


def test_objects_with_the_same_way_have_different_names() -> None:
    """A name means one object: a second one on the same way gets a number."""

    def inner() -> Callable[..., Any]:
        weight = torch.ones(2, requires_grad=True)
        return lambda: weight

    weight, other = torch.zeros(2, requires_grad=True), inner()
    scene = _scene(lambda x: (weight, other))
    assert {scene.names.of(weight), scene.names.of(other())} == {"weight", "weight#2"}


def test_long_chains_and_circles() -> None:
    """Objects that lead to each other are followed however long the way is, and once."""
    first = last = Meter()
    for _ in range(5000):
        last.total = last = Meter()  # type: ignore[assignment]
    last.total = first  # type: ignore[assignment]
    scene = _scene(lambda x: first)
    last.total = 1.0
    assert len(scene.changed_state()) == 1
    scene.restore()
    assert last.total is first


class Trainer:
    """Has a decorated method, and is called itself."""

    def __init__(self) -> None:
        self.model, self.calls = nn.Linear(2, 2), 0

    def __call__(self, x: Tensor) -> None:
        """Take a batch."""

    def step(self, x: Tensor) -> None:
        """Take a batch."""


@pytest.mark.parametrize("kind", ["method", "object", "module"])
def test_functions_that_belong_to_objects(kind: str) -> None:
    """The object of a method, a callable object and a module that is called are reached."""
    trainer = Trainer()
    function = {"method": trainer.step, "object": trainer, "module": nn.Identity()}[kind]
    scene = Scene(
        replace(subject_of(anybatch.apply(["x"])(lambda x: x), (torch.zeros(2),), {}), function=function)
    )
    changed = trainer if kind != "module" else function
    changed.calls = 1
    assert len(scene.changed_state()) == 1
    scene.restore()
    assert getattr(changed, "calls", 0) == 0
    if kind != "module":
        assert scene.names.of(trainer.model.weight) == "weight"
