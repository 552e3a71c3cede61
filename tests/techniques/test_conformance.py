"""What holds for every technique alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from tests.techniques.catalogue import EXAMPLES, Example
from torch import nn

from anybatch import techniques
from anybatch.errors import TechniqueError
from anybatch.techniques import LoaderOptions, Setting, Technique

_INTERFACE = {"LoaderOptions", "Setting", "Technique"}


@pytest.fixture(params=sorted(EXAMPLES), name="name")
def _name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(name="example")
def _example(name: str) -> Example:
    return EXAMPLES[name]


def test_every_public_technique_is_looked_at_here() -> None:
    """The catalogue has each technique that the package shows."""
    assert set(EXAMPLES) == {
        name
        for name in techniques.__all__
        if name not in _INTERFACE and issubclass(getattr(techniques, name), Technique)
    }


def test_it_is_a_final_frozen_dataclass(name: str, example: Example) -> None:
    """A technique is plain data that nobody changes or extends."""
    technique = example.make()
    assert type(technique) is getattr(techniques, name)
    assert getattr(type(technique), "__final__", False)
    for each in dataclasses.fields(technique):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(technique, each.name, None)


def test_it_prints_as_it_is_written_and_compares(name: str, example: Example) -> None:
    """Two techniques with the same options are equal, hash alike, and say what they are."""
    first, second = example.make(), example.make()
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)
    assert repr(first).startswith(f"{name}(")
    assert "0x" not in repr(first)


def test_it_refuses_wrong_options(name: str, example: Example) -> None:
    """Wrong options are refused at construction, with the name of the technique and what to do."""
    for options in example.wrong:
        with pytest.raises(TechniqueError, match=f"^`{name}`: ") as caught:
            getattr(techniques, name)(**options)
        assert "Got " in str(caught.value), options


def test_every_technique_with_options_has_wrong_ones_to_refuse(example: Example) -> None:
    """No technique takes whatever it is given."""
    assert bool(example.wrong) == bool(dataclasses.fields(example.make()))


def test_it_says_its_source_and_what_it_does_to_the_gradient(example: Example) -> None:
    """Source and exactness stand in the class and in its docstring."""
    kind = type(example.make())
    assert kind.source.strip()
    assert kind.exactness.strip().endswith(".")
    assert kind.recommendation in {None, *range(1, 12)}
    assert "\n    Source: " in (kind.__doc__ or "")
    assert "\n    Error: " in (kind.__doc__ or "")


@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_no_trace(example: Example, fails: bool) -> None:
    """After a run, whether it failed or not, the model and the optimizer are as they were."""
    setting = example.setting()
    before = _state(setting)
    try:
        with example.make().applied(setting):
            _train(setting, example.make(), rows=0)
            if fails:
                raise KeyError("the user's own")
    except KeyError:
        assert fails
    assert_same(before, _state(setting))


def test_it_can_be_applied_again_and_to_two_models(example: Example) -> None:
    """One technique serves run after run, and two runs at a time."""
    technique = example.make()
    settings = [example.setting(), example.setting()]
    before = [_state(each) for each in settings]
    for _ in range(2):
        with technique.applied(settings[0]), technique.applied(settings[1]):
            pass
    for state, each in zip(before, settings, strict=True):
        assert_same(state, _state(each))


def test_the_modes_of_the_model_stay_the_callers(example: Example) -> None:
    """In a run and after it, the model can be put into eval mode and back."""
    setting = example.setting()
    with example.make().applied(setting):
        setting.model.eval()
        assert not any(module.training for module in setting.model.modules())
        setting.model.train()
    assert setting.model.training


def test_it_keeps_what_the_loader_has_got(example: Example) -> None:
    """The loader's options stay options, and the defaults stay a legal set."""
    options = example.make().loading(LoaderOptions(), example.setting())
    assert isinstance(options, LoaderOptions)
    assert options.num_workers or (options.prefetch_factor is None and not options.persistent_workers)


def test_a_technique_must_say_what_it_does() -> None:
    """A class that does not say its source and exactness can't be made."""
    with pytest.raises(TypeError, match="its source and its exactness"):
        type("Silent", (Technique,), {})


def test_the_package_shows_what_it_lists() -> None:
    """Every name of `__all__` can be imported, and no other name is made up."""
    assert sorted(techniques.__all__) == techniques.__all__
    for name in techniques.__all__:
        assert getattr(techniques, name).__name__ == name
        assert name in dir(techniques)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = techniques.Nothing


def _train(setting: Setting, technique: Technique, rows: int) -> None:
    """Enters what a run enters around a piece, without running one."""
    with technique.forward(setting):
        pass


def _state(setting: Setting) -> dict[str, object]:
    model = setting.model
    tensors = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    return {
        "tensors": tensors,
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "attributes": {name: _attributes(module) for name, module in model.named_modules()},
        "optimizer": _attributes_of_optimizer(setting.optimizer),
        "random": torch.get_rng_state(),
    }


def _attributes(module: nn.Module) -> dict[str, object]:
    """Everything in the module's own dictionary: hooks are dictionaries in it, a new forward an entry."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}


def _attributes_of_optimizer(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, int]]:
    return [] if optimizer is None else [(key, id(value)) for key, value in vars(optimizer).items()]


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    """Two states are the same, bit for bit and object for object."""
    assert before.keys() == after.keys()
    for key, (tensor, copied) in before["tensors"].items():  # type: ignore[attr-defined]
        now, now_copied = after["tensors"][key]  # type: ignore[index]
        assert now is tensor
        assert torch.equal(now_copied, copied)
    assert before["requires_grad"] == after["requires_grad"]
    for name, attributes in before["attributes"].items():  # type: ignore[attr-defined]
        assert list(_flat(attributes)) == list(_flat(after["attributes"][name]))  # type: ignore[index]
    assert before["optimizer"] == after["optimizer"]
    assert torch.equal(before["random"], after["random"])  # type: ignore[arg-type]


def _flat(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in attributes.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", id(one)) for inner, one in value.items())
        else:
            yield key, value if isinstance(value, (bool, int, float, str)) else id(value)
