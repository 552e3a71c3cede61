"""The acts of the demo, on little data and without a cap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import anybatch.cli.demo.acts as acts
from anybatch.cli.demo.acts import compare_without_cap, train_in_pieces, try_whole
from anybatch.cli.demo.digits import Digits, load_digits
from anybatch.cli.demo.messages import Progress
from anybatch.cli.demo.settings import Settings
from anybatch.cli.demo.ways import with_anybatch, with_loop


@pytest.fixture
def digits() -> Digits:
    """The first hundred training rows, and twenty for the test."""
    loaded = load_digits()
    return Digits(loaded.images[:100], loaded.labels[:100], loaded.test_images[:20], loaded.test_labels[:20])


@pytest.fixture
def uncapped(settings: Settings) -> Settings:
    """Three steps without a cap."""
    return replace(settings, steps=3, cap_bytes=None, compared_rows=50)


def test_whole_mini_batch_without_a_cap_takes_one_step(digits: Digits, uncapped: Settings) -> None:
    """Where memory suffices the whole mini-batch trains, and the result says that no cap was in force."""
    seen: list[Progress] = []
    result = try_whole(digits, uncapped, seen.append)
    assert (result.cap_in_force, result.out_of_memory, result.steps_done) == (False, None, 1)
    assert [(each.done, each.total) for each in seen] == [(0, 1), (1, 1)]


def test_pieces_train_like_the_whole(digits: Digits, uncapped: Settings) -> None:
    """Every step in micro-batches has the loss of plain training on the whole mini-batch."""
    seen: list[Progress] = []
    result = train_in_pieces(digits, uncapped, seen.append)
    assert result.steps_done == 3
    assert result.scores.keys() == {"accuracy", "precision", "recall", "f1"}
    whole: list[Progress] = []
    acts._train_capped(acts.whole_step, 3, digits, uncapped, whole.append)
    assert [each.note for each in seen] == [each.note for each in whole]


def test_out_of_memory_is_a_result(
    digits: Digits, uncapped: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An act that runs out of memory reports the error, the steps before it, and no peak."""

    def one_step_then_full(*arguments: object) -> object:
        yield 1.0
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(acts, "train", one_step_then_full)
    result = train_in_pieces(digits, uncapped, [].append)
    assert (result.steps_done, result.out_of_memory) == (1, "CUDA out of memory")
    assert (result.peak_bytes, result.scores) == (None, {})


@pytest.mark.parametrize(
    ("message", "in_force"),
    [
        ("mat1 and mat2 shapes cannot be multiplied", False),
        ("mat1 and mat2 shapes cannot be multiplied", True),
        ("could not create a primitive", False),
    ],
)
def test_another_error_is_no_result(
    message: str, in_force: bool, digits: Digits, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that is not about memory ends the act as an error, as does a doubtful one without a cap."""

    def faulty(*arguments: object) -> object:
        yield 1.0
        raise RuntimeError(message)

    monkeypatch.setattr(acts, "limit_growth", lambda growth_bytes: in_force)
    monkeypatch.setattr(acts, "train", faulty)
    with pytest.raises(RuntimeError, match=message):
        train_in_pieces(digits, settings, [].append)


def test_doubtful_error_under_the_cap_is_a_result(
    digits: Digits, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN's error without a reason counts as out of memory where the cap is in force."""

    def full(*arguments: object) -> object:
        yield 1.0
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(acts, "limit_growth", lambda growth_bytes: True)
    monkeypatch.setattr(acts, "train", full)
    result = train_in_pieces(digits, settings, [].append)
    assert (result.cap_in_force, result.out_of_memory) == (True, "could not create a primitive")


def test_comparison_is_exact_and_reports_each_part(
    digits: Digits, uncapped: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients in micro-batches are the whole's in float64; the loop's are not."""
    # mbp-pytorch is left to the command's own children: it configures the root logger.
    ways = {"loop": with_loop, "anybatch": with_anybatch}
    monkeypatch.setattr(acts, "installed_ways", lambda: (ways, {"mbp-pytorch": "left out"}))
    seen: list[Progress] = []
    result = compare_without_cap(digits, uncapped, seen.append)
    assert result.loss_error <= 1e-10
    assert result.gradient_error <= 1e-10
    assert result.uneven_errors["anybatch"] <= 1e-10
    assert result.uneven_errors["loop"] > 0.05
    assert result.missing == {"mbp-pytorch": "left out"}
    assert [each.done for each in seen] == [0, 1, 2, 3, 4]
    assert {each.total for each in seen} == {4}


def test_comparison_sees_a_wrong_gradient(
    digits: Digits, uncapped: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches whose gradients are 0.1 % off, or whose loss is, are found out."""

    def slightly_off(names: list[str], ub_size: int) -> object:
        def decorate(function: object) -> object:
            def step(model: torch.nn.Module, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
                loss = 1.001 * acts.loss_of(model, x, label)
                loss.backward()
                return loss.detach()

            return step

        return decorate

    monkeypatch.setattr(acts.anybatch, "apply", slightly_off)
    assert acts._whole_errors(digits, uncapped) == pytest.approx((1e-3, 1e-3))


def test_uneven_case_is_uneven(digits: Digits, uncapped: Settings) -> None:
    """Each way gets a hundred rows to cut by 32, the labels of about 40 % of them ignored."""
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    acts._uneven_error(lambda model, x, label, ub_size: seen.append((x, label, ub_size)), digits, uncapped)
    ((x, label, ub_size),) = seen
    assert torch.equal(x, digits.images.double())
    assert ub_size == 32
    assert 30 <= (label == -100).sum() <= 50
    counted = label != -100
    assert torch.equal(label[counted], digits.labels[counted])
