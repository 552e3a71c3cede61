"""`anybatch.verify`: a call in micro-batches against the same call whole."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anybatch._verify import runs
from anybatch._verify.causes import Diagnosis, diagnose
from anybatch._verify.laboratory import Laboratory, Measured, in_float64
from anybatch._verify.report import Verification
from anybatch._verify.runs import Outcome
from anybatch._verify.scene import Scene
from anybatch._verify.sentences import Sentences
from anybatch._verify.subject import Subject, subject_of, with_leaves
from anybatch._verify.switches import Switch
from anybatch.fit.guard import is_out_of_memory
from anybatch.memory.device import widest_float

_ONE_PIECE = (
    "The mini-batch fits in one piece, so nothing was cut. To compare pieces, give more rows or decorate the "
    "function with a smaller `ub_size`."
)


def verify(step: Callable[..., Any], /, *args: Any, double: bool = False, **kwargs: Any) -> Verification:
    """Runs a call of a decorated function whole and in micro-batches, and says whether they are equal.

    The losses and the gradients of everything that gets one are compared: parameters, other leaves, batch
    entries that require grad. Where they differ, further runs find out why: BatchNorm layers, dropout and
    other random numbers, a loss that does not add up or can't be read, a wrong `weight=`, a function that
    keeps state or changes its arguments. Several causes at once are each found.

    The runs leave no trace: weights, buffers, modes, gradients, hooks, random states, arguments, and what the
    decorated function has learnt from earlier calls, are as before, also after an exception. The same holds
    for variables, attributes and containers that the function reaches in its own file. What it does beyond
    (writing files, objects of other libraries) happens in each run. Hooks on tensors don't run.

    It needs memory for the mini-batch whole, and for a copy of parameters, buffers and arguments. An exact
    call costs two runs, and two more in float32 where they are more than two roundings apart; where the own
    error of that one whole run allows less than there is, six more. Finding causes takes some more for each.

    Args:
        step: A function decorated with `anybatch.apply`.
        *args: What it is called with. A mini-batch that fits in one piece is not cut, and can't differ.
        double: Runs all in float64: modules, arguments, and what the function asks to be float32 on the way.
            Differences are then those of the method, not of rounding.
        **kwargs: What it is called with, by keyword.

    Returns:
        The findings, which print as a short report.

    Raises:
        TypeError: `step` is not decorated with `anybatch.apply`.
        ValueError: `double` on a device that has no float64; a lazy module that has not run yet.
        BatchError, LossError, WeightError: As from the call.

    Error:
        "Exact" means that no difference is above 1e-10 of the largest gradient where everything is float64.
        Otherwise it is not above twice the rounding error that the mini-batch whole has against float64 (the
        largest of up to four runs, whose backward starts from other seeds, for one may hit the true value by
        chance), or two roundings of the lowest dtype; or the micro-batches are themselves within that of the
        float64 result. Where the call can't run in float64: 64 roundings, at most 5 %.

    Example:
        >>> import torch, anybatch
        >>> model = torch.nn.Linear(3, 2).double()
        >>> @anybatch.apply(["x", "label"], ub_size=4)
        ... def train_fn(x, label):
        ...     return torch.nn.functional.cross_entropy(model(x), label)
        >>> x, label = torch.randn(10, 3).double(), torch.tensor([0, 1] * 5)
        >>> found = anybatch.verify(train_fn, x=x, label=label)
        >>> found.is_exact, found.sizes
        (True, (4, 3, 3))
    """
    with torch.inference_mode(False), torch.enable_grad(), _noted_out_of_memory():
        subject = with_leaves(subject_of(step, args, kwargs))
        scene = Scene(subject)
        if not double:
            return _verify(subject, Laboratory(subject, scene))
        _check_has_double(scene)
        _find_modules(subject, scene)
        with in_float64(subject, scene) as laboratory:
            return _verify(subject, laboratory)


@contextmanager
def _noted_out_of_memory() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error, to ask the one guard about it
        if is_out_of_memory(error):
            error.add_note(
                "`verify` runs the mini-batch whole, too: give it as many rows as the device holds."
            )
        raise


def _check_has_double(scene: Scene) -> None:
    device = scene.device
    if device is not None and widest_float(device) != torch.float64:
        raise ValueError(
            f"`verify`: `double=True` needs a device that has float64. Got {device}. Leave `double` out, or "
            "move the model to another device."
        )


def _find_modules(subject: Subject, scene: Scene) -> None:
    """Runs the call once, so that the scene knows modules that are out of reach."""
    with scene.undone():
        runs.whole(subject, scene)


def _verify(subject: Subject, laboratory: Laboratory) -> Verification:
    sentences = Sentences(laboratory.names)
    as_is = laboratory.measure_as_is()
    measured = _measured(subject, laboratory, as_is)
    if measured.is_exact:
        diagnosis = Diagnosis(unproved=as_is.pieces.unproved if as_is.pieces else ())
    else:
        with _noted(measured):
            diagnosis = diagnose(laboratory, as_is, subject.settings.weights, sentences)
    return replace(
        measured,
        causes=diagnosis.causes,
        switched_off=diagnosis.switched_off,
        remaining_error_ratio=diagnosis.remaining_ratio,
        is_explained=diagnosis.is_explained,
        notes=tuple(_notes(laboratory, as_is, measured.sizes, sentences, diagnosis)),
    )


def _measured(subject: Subject, laboratory: Laboratory, as_is: Measured) -> Verification:
    limit = laboratory.limit_for(as_is.difference)
    return Verification(
        function=subject.bound.name,
        is_exact=laboratory.is_exact(as_is),
        rows=subject.layout.rows,
        sizes=subject.sizes,
        loss_whole=_losses(as_is.whole),
        loss_in_pieces=_losses(as_is.pieces) if as_is.pieces else math.nan,
        loss_error_ratio=as_is.difference.loss_ratio,
        largest_error_ratio=as_is.difference.gradient_ratio,
        parameter=as_is.difference.parameter,
        allowed_ratio=limit.ratio,
        allowed_because=limit.reason,
    )


@contextmanager
def _noted(measured: Verification) -> Iterator[None]:
    """Adds what is known already to an exception that an experiment causes."""
    try:
        yield
    except Exception as error:  # whatever it is, it passes with a note
        error.add_note(f"`verify`: raised by an experiment that looked for causes. Known before:\n{measured}")
        raise


def _losses(outcome: Outcome) -> float | dict[str, float]:
    by_name = {name: value for name, value in outcome.losses.items() if name is not None}
    return by_name or outcome.losses[None]


def _notes(
    laboratory: Laboratory,
    as_is: Measured,
    sizes: tuple[int, ...],
    sentences: Sentences,
    diagnosis: Diagnosis,
) -> Iterator[str]:
    if len(sizes) == 1:
        yield _ONE_PIECE
    elif laboratory.first.generators and diagnosis.is_explained and not diagnosis.has(Switch.DROPOUT):
        yield sentences.same_draws(laboratory.dropout)
    if not diagnosis.causes and not laboratory.is_allowed(as_is.difference):
        nearness = laboratory.nearness(as_is)
        assert nearness is not None
        yield sentences.as_near(nearness)
    if laboratory.first.inputs and not diagnosis.has(Switch.INPUTS):
        yield sentences.inputs(laboratory.first.inputs)
    yield from map(sentences.not_proved, diagnosis.unproved)
