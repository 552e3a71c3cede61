"""Tests of `ub_size="auto"`: sizes that follow from the memory that there is, and the same gradients."""

import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Auto
from anybatch.errors import DoesNotFitError
from anybatch.memory.reading import Quantity, Reading
from anybatch.memory.state import MemoryState

MIB = 1 << 20


def net(width: int = 256) -> nn.Module:
    """A network whose activations take 2 * `width` * 8 bytes a row and more."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4)).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(rows)
    label = torch.randint(0, 4, (rows,), generator=generator)
    label[torch.rand(rows, generator=generator) < 0.3] = -100
    return torch.randn(rows, 16, generator=generator, dtype=torch.float64), label


Machine = Callable[[int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets what a stand-in for the machine has left: the real one changes with all that runs on it."""

    class NoMeter:
        begin_bytes = end_bytes = growth_bytes = 0
        is_marked = False

        def __init__(self, device: torch.device) -> None:
            pass

        def __enter__(self) -> "NoMeter":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def has(left_bytes: int) -> None:
        figures = {quantity: Reading(quantity, left_bytes, "stand-in") for quantity in Quantity}
        figures[Quantity.LIVE] = Reading(Quantity.LIVE, 0, "stand-in")
        names = (Quantity.LIVE, Quantity.PEAK, Quantity.RESERVED, Quantity.LIMIT, Quantity.BUDGET)
        state = MemoryState(torch.device("cpu"), *(figures[name] for name in names))
        monkeypatch.setattr(Auto, "memory", lambda auto, device: state)
        monkeypatch.setattr("anybatch._automatic.PeakMeter", NoMeter)
        monkeypatch.setattr("anybatch._foresee.malloc_setting", lambda: None)

    return has


def step_of(model: nn.Module, auto: Any, **options: Any) -> Callable[..., Any]:
    """A decorated training function."""

    @anybatch.apply(["x", "label"], ub_size=auto, **options)
    def step(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    return step


def gradients_of(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """The gradients that a call leaves."""
    model.zero_grad()
    run()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_exact(model: nn.Module, step: Callable[..., Any], x: Tensor, label: Tensor) -> None:
    """The gradients are those of the whole mini-batch in plain PyTorch (Rule 1)."""
    got = gradients_of(model, lambda: step(x=x, label=label))
    expected = gradients_of(model, lambda: F.cross_entropy(model(x), label).backward())
    largest = max(one.abs().max() for one in expected)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= 1e-10 * largest


def test_mini_batch_that_fits_is_not_cut() -> None:
    """With room for all rows there is one piece."""
    auto, model = Auto(), net()
    x, label = batch(50)
    assert_exact(model, step_of(model, auto), x, label)
    (record,) = auto
    assert record.rows == 50
    assert "fits whole" in record.reason


@pytest.mark.parametrize("rows", [3, 1000, 4001])
def test_small_budget_cuts_and_stays_exact(rows: int, machine: Machine) -> None:
    """Pieces follow from the budget; the gradient is that of the whole, in every call."""
    machine(4 * MIB)
    model = net()
    auto = Auto(prefer="largest")
    step = step_of(model, auto)
    x, label = batch(rows)
    for _ in range(4):
        assert_exact(model, step, x, label)
    (record,) = auto if rows > 3 else [None]
    if record is not None and rows == 4001:
        assert 1 < record.rows < rows
        assert record.failures == 0


def test_need_is_within_the_budget(machine: Machine) -> None:
    """What the pieces need, as torch's tensors count, is no more than the budget leaves."""
    machine(6 * MIB)
    model = net()
    auto = Auto(prefer="largest")
    step = step_of(model, auto)
    x, label = batch(6000)
    step(x=x, label=label)
    (record,) = auto
    a_row = 2 * 256 * 8
    assert record.rows * a_row < 6 * MIB
    assert record.rows * a_row * 4 > 2 * MIB


def test_fastest_size_is_settled_and_exact(machine: Machine) -> None:
    """Sizes are tried by halving, one per call, and every call is exact."""
    machine(4 * MIB)
    model = net()
    auto = Auto()
    step = step_of(model, auto)
    x, label = batch(3000)
    sizes = []
    for _ in range(14):
        assert_exact(model, step, x, label)
        sizes.append(next(iter(auto)).rows)
    assert len(set(sizes)) <= 6
    assert sizes[-1] == sizes[-2]


def test_longer_rows_are_sized_before_they_run(machine: Machine) -> None:
    """A batch of longer rows gets smaller pieces at once, and short ones get theirs back (S04)."""
    machine(6 * MIB)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    auto = Auto(prefer="largest")

    @anybatch.apply(["x"], ub_size=auto)
    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    used: dict[int, list[int]] = {}
    for length in (16, 20, 64, 16, 128, 16):
        x = torch.randn(600, length, 8, dtype=torch.float64)
        got = gradients_of(model, lambda x=x: step(x=x))
        expected = gradients_of(model, lambda x=x: model(x).square().mean().backward())
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-15)
        record = next(record for record in auto if record.extent[0] >= length)
        used.setdefault(length, []).append(record.rows)
    assert used[128][0] < used[64][0] < used[16][0]
    assert used[16][-1] >= used[16][0]
    assert sum(record.failures for record in auto) == 0


def test_rows_that_hold_a_little_less_share_a_size(machine: Machine) -> None:
    """No symbolic run is made for each length between two known ones."""
    machine(16 * MIB)
    model = net()
    auto = Auto()

    @anybatch.apply(["x"], ub_size=auto)
    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    for length in (100, 99, 95, 90, 85):
        step(x=torch.randn(8, length, 16, dtype=torch.float64))
    assert len(list(auto)) == 1


def fails_beyond(most_rows: int, model: nn.Module) -> Callable[..., Tensor]:
    """A loss that runs out of memory with more rows, in real runs."""

    def loss(x: Tensor, label: Tensor) -> Tensor:
        if len(x) > most_rows and type(x) is Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
        return F.cross_entropy(model(x), label)

    return loss


@pytest.mark.parametrize("most_rows", [1, 2, 7, 60])
def test_out_of_memory_is_survived(most_rows: int) -> None:
    """The call goes on with smaller pieces, exactly; later calls begin with a size that fits."""
    model = net()
    auto = Auto()
    step = anybatch.apply(["x", "label"], ub_size=auto)(fails_beyond(most_rows, model))
    x, label = batch(100)
    with warnings.catch_warnings():
        # Where not even two rows fit, nothing can be probed, and that is said.
        warnings.filterwarnings("ignore", "(?s).*a probe of two rows ran out of memory")
        assert_exact(model, step, x, label)
    (record,) = auto
    assert record.rows <= most_rows
    failures = record.failures
    assert failures <= 12
    assert_exact(model, step, x, label)
    assert record.failures == failures


def test_size_grows_back() -> None:
    """A size that ran out of memory is tried again after some calls: others may have given memory back."""
    model = net()
    limit = [10]

    @anybatch.apply(["x", "label"], ub_size=(auto := Auto()))
    def step(x: Tensor, label: Tensor) -> Tensor:
        return fails_beyond(limit[0], model)(x, label)

    x, label = batch(40)
    step(x=x, label=label)
    (record,) = auto
    assert record.rows <= 10
    limit[0] = 1000
    for _ in range(20):
        step(x=x, label=label)
    assert record.rows == 40


def test_single_row_that_does_not_fit() -> None:
    """The error says what is needed, what there is and what would help; nothing has changed."""
    model = net()
    step = anybatch.apply(["x", "label"], ub_size="auto")(fails_beyond(0, model))
    x, label = batch(10)
    with pytest.raises(
        DoesNotFitError, match=r"no micro-batch fits\. Memory of cpu ran out with one row"
    ) as caught:
        step(x=x, label=label)
    assert caught.value.rows == 1
    assert caught.value.needed_bytes is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_budget_without_room_is_said_before_anything_runs(machine: Machine) -> None:
    """Where it is foreseen that not even one row fits, the function does not run on real rows."""
    machine(1 * MIB)
    model, seen = net(4096), []

    @anybatch.apply(["x"], ub_size=Auto(margin=0))
    def step(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            seen.append(len(x))
        return model(x).mean()

    with pytest.raises(DoesNotFitError, match="no micro-batch fits"):
        step(x=torch.randn(10, 16, dtype=torch.float64))
    assert seen == []


def test_step_of_a_given_optimizer_that_does_not_fit(machine: Machine) -> None:
    """State and temporaries of the optimizer's first step count, before they exist."""
    model = net(4096)
    optimizer = torch.optim.AdamW(model.parameters())
    elements = sum(map(Tensor.numel, model.parameters()))
    machine(int(2.5 * 8 * elements))
    step = step_of(model, Auto(optimizer=optimizer))
    x, label = batch(10)
    with pytest.raises(DoesNotFitError, match="the optimizer's step does not fit"):
        step(x=x, label=label)
    assert not optimizer.state


def test_optimizer_that_was_seen_is_counted_exactly(machine: Machine) -> None:
    """Without one given, Adam's state is expected; once a step was seen nothing more is."""
    machine(64 * MIB)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto = Auto()
    step = step_of(model, auto)
    x, label = batch(100)
    step(x=x, label=label)
    (record,) = auto
    elements = sum(map(Tensor.numel, model.parameters()))
    assert record.step.state_bytes >= 2 * 8 * elements
    optimizer.step()
    step(x=x, label=label)
    assert record.step.state_bytes == 0


def test_other_errors_are_not_answered_by_smaller_pieces() -> None:
    """An error of the function's own passes unchanged after one real run."""
    calls = []

    @anybatch.apply(["x"], ub_size="auto")
    def step(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            calls.append(len(x))
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        step(x=torch.randn(64, 3))
    assert len(calls) <= 3


def test_error_that_may_mean_memory_is_raised_as_it_is_in_the_end() -> None:
    """What may be a question of memory is answered by smaller pieces, or stands if they don't help."""
    sizes = []

    @anybatch.apply(["x"], ub_size="auto")
    def step(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            sizes.append(len(x))
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ...")

    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED") as caught:
        step(x=torch.randn(64, 3))
    assert not isinstance(caught.value, DoesNotFitError)
    assert min(sizes) <= 2


def test_batch_norm_never_gets_a_single_row() -> None:
    """Pieces of layers that take statistics hold two rows at least, also of an odd number of rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()

    @anybatch.apply(["x", "label"], ub_size="auto")
    def step(x: Tensor, label: Tensor) -> tuple[Tensor, int]:
        if len(x) > 3 and type(x) is Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. (simulated)")
        return F.cross_entropy(model(x), label), len(x)

    x, label = batch(9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anybatch.errors.InexactWarning)
        _, sizes = step(x=x, label=label.clamp(min=0))
    assert sizes == [3, 3, 3]


def test_evaluation_has_a_size_of_its_own() -> None:
    """Running out of memory in evaluation leaves the size of training alone."""
    model = net()
    auto = Auto()
    step = anybatch.apply(["x", "label"], ub_size=auto)(fails_beyond(20, model))
    x, label = batch(20)
    step(x=x, label=label)
    training = next(iter(auto))
    with torch.no_grad():
        value = step(x=torch.cat([x, x]), label=torch.cat([label, label]))
    torch.testing.assert_close(value, F.cross_entropy(model(x), label).detach())
    assert training.rows == 20
    assert training.failures == 0
    assert [record.failures for record in auto] == [0, 1]


def test_largest_bounds_the_size() -> None:
    """No piece has more rows than `largest`: 50 rows by 16 are four pieces, of 13 rows at most."""
    model = net()
    auto = Auto(largest=16)
    x, label = batch(50)
    assert_exact(model, step_of(model, auto), x, label)
    assert next(iter(auto)).rows == 13


def test_code_that_needs_values_is_foreseen_by_running(machine: Machine) -> None:
    """A function that can't run symbolically is run on two and three rows, and put back."""
    machine(6 * MIB)
    model = net()
    auto = Auto(prefer="largest")

    @anybatch.apply(["x", "label"], ub_size=auto)
    def step(x: Tensor, label: Tensor) -> Tensor:
        kept = label != -100
        return F.cross_entropy(model(x)[kept], label[kept])

    x, label = batch(4000)
    assert_exact(model, step, x, label)
    (record,) = auto
    assert "runs of 2 and 3 rows; no symbolic run" in record.how
    assert 1 < record.rows < 4000
    assert record.failures == 0


def test_loss_over_pairs_of_rows_is_confirmed(machine: Machine) -> None:
    """What grows with the square of the rows is found by a run at the size itself."""
    machine(16 * MIB)
    auto = Auto(prefer="largest")
    model = nn.Linear(4, 4).double()

    @anybatch.apply(["x"], ub_size=auto, on_inexact="ignore")
    def step(x: Tensor) -> Tensor:
        z = model(x)
        return (z @ z.T).square().mean()

    step(x=torch.randn(5000, 4, dtype=torch.float64))
    (record,) = auto
    assert record.rows**2 * 8 < 16 * MIB
    assert record.rows > 100
    assert record.failures == 0


def state_of_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a search for a size must leave alone."""
    return {
        "weights": copy.deepcopy(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "python": random.getstate(),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }


def test_search_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Weights, buffers, modes, gradients, random states and optimizer are as they were at the first piece."""
    machine(2 * MIB)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4)).double()
    model[3].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of_everything(model, optimizer)
    seen: dict[str, Any] = {}

    from anybatch._call import Call

    fit = Call.fit

    def look(call: Call) -> None:
        fit(call)
        seen.setdefault("after", state_of_everything(model, optimizer))

    monkeypatch.setattr(Call, "fit", look)
    x, label = batch(64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anybatch.errors.InexactWarning)
        step_of(model, Auto(optimizer=optimizer))(x=x, label=label.clamp(min=0))
    after = seen["after"]
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)


def test_state_dict_goes_through_json(machine: Machine) -> None:
    """A run that loads what another knew makes no symbolic run, and chooses the same."""
    machine(4 * MIB)
    model = net()
    auto = Auto(prefer="largest")
    step = step_of(model, auto)
    x, label = batch(3000)
    for _ in range(3):
        step(x=x, label=label)
    other = Auto(budget=auto.budget, prefer="largest")
    other.load_state_dict(json.loads(json.dumps(auto.state_dict())))
    assert str(other).splitlines()[0] == str(auto).splitlines()[0]
    (record,) = other
    known = record.limit_rows
    model.zero_grad()
    step_of(model, other)(x=x, label=label)
    assert len(list(other)) == 1
    assert record.rows <= known
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({"version": 0, "kinds": {}})


def test_explanation_has_the_figures(capsys: pytest.CaptureFixture[str], machine: Machine) -> None:
    """`explain()` prints need, room, ceiling, choice and why."""
    machine(4 * MIB)
    model = net()
    auto = Auto()
    auto.explain()
    assert "no call" in capsys.readouterr().out
    x, label = batch(3000)
    step_of(model, auto)(x=x, label=label)
    auto.explain()
    printed = capsys.readouterr().out
    for word in (
        "step",
        "training",
        "need",
        "per row",
        "peak",
        "aten::",
        "measured",
        "room",
        "budget",
        "ceiling",
        "choice",
    ):
        assert word in printed


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "lots"},
        {"budget": -1},
        {"budget": 1.5},
        {"margin": 0.0},
        {"prefer": "slowest"},
        {"largest": 0},
        {"largest": True},
        {"largest": 2.5},
        {"optimizer": "adam"},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Auto(**options)


def test_lazy_modules_are_not_foreseen_before_they_have_a_shape() -> None:
    """The first call of a model of lazy modules goes through, and its gradient is that of the whole."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Tanh(), torch.nn.LazyLinear(1)).double()
    x = torch.randn(9, 3, dtype=torch.float64)

    @anybatch.apply(["x"], ub_size=anybatch.Auto(largest=2))
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    for _ in range(2):
        model.zero_grad()
        step(x=x)
        parameters = list(model.parameters())
        whole = torch.autograd.grad(model(x).square().mean(), parameters)
        for parameter, expected in zip(parameters, whole, strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)


def test_copies_know_the_same(machine: Machine) -> None:
    """A copy, or one that went through pickle, chooses as the first one does, and leaves it alone."""
    machine(4 * MIB)
    model = net()
    auto = Auto(prefer="largest")
    x, label = batch(3000)
    step_of(model, auto)(x=x, label=label)
    for other in (copy.deepcopy(auto), pickle.loads(pickle.dumps(auto))):
        assert str(other) == str(auto)
        step_of(model, other)(x=x, label=label)
    del other
    step_of(model, auto)(x=x, label=label)
