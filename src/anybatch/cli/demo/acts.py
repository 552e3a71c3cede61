"""The acts of the demo, each run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

import anybatch
from anybatch.cli.demo.digits import Digits
from anybatch.cli.demo.messages import Comparison, Found, Progress, Result, Training
from anybatch.cli.demo.network import build_network
from anybatch.cli.demo.settings import IGNORED_SHARE, THREADS, UNEVEN_ROWS, UNEVEN_UB_SIZE, Settings
from anybatch.cli.demo.training import scores_of, train, whole_step
from anybatch.cli.demo.ways import Step, Way, gradient_error, gradients_of, installed_ways, loss_of
from anybatch.errors import DoesNotFitError
from anybatch.fit.guard import MemoryVerdict, memory_verdict
from anybatch.memory.gauge import HostGauge
from anybatch.memory.limit import limit_growth
from anybatch.memory.peak import PeakMeter
from anybatch.memory.process import Currency, data_bytes

__all__ = ["ACTS", "Act", "Report", "compare_without_cap", "load_torch", "train_in_pieces", "try_whole"]

Report = Callable[[Progress], None]
Act = Callable[[Digits, Settings, Report], Result]

_IGNORED = -100
_CURVE_POINTS = 64


def try_whole(digits: Digits, settings: Settings, report: Report) -> Training:
    """One step on the whole mini-batch in plain PyTorch, under the cap: it is meant to run out of memory."""
    return _train_capped(whole_step, 1, digits, settings, report)


def train_in_pieces(digits: Digits, settings: Settings, report: Report) -> Training:
    """The whole training in micro-batches of a size that is found, under the same cap."""
    auto = anybatch.Auto(prefer="largest")
    step: Step = anybatch.apply(["x", "label"], ub_size=auto)(loss_of)
    result = _train_capped(step, settings.steps, digits, settings, report)
    return replace(result, found=_found(auto, len(digits.labels)))


def _found(auto: anybatch.Auto, rows: int) -> Found | None:
    """The size that training settled on; None where it did not get so far."""
    record = next(iter(auto), None)
    if record is None or not record.rows:
        return None
    steps = range(2, rows + 1, max(1, rows // _CURVE_POINTS))
    curve_bytes = {str(each): record.need.peak_bytes(each) for each in steps}
    available_bytes = record.available_bytes
    if available_bytes is not None:
        available_bytes += record.need.superfluous_bytes
    return Found(min(record.rows, rows), record.ceiling_rows, record.failures, available_bytes, curve_bytes)


def compare_without_cap(digits: Digits, settings: Settings, report: Report) -> Comparison:
    """What a capped process can't show: the whole mini-batch's memory, loss and gradients."""
    ways, missing = installed_ways()
    total = 2 + len(ways)
    report(Progress(0, total, "memory of the whole mini-batch"))
    whole_peak_bytes = _whole_peak_bytes(digits, settings)
    report(Progress(1, total, "float64 gradients of the whole"))
    loss_error, whole_gradient_error = _whole_errors(digits, settings)
    uneven_errors = {}
    for done, (name, way) in enumerate(ways.items(), start=2):
        report(Progress(done, total, f"uneven cut: {name}"))
        uneven_errors[name] = _uneven_error(way, digits, settings)
    report(Progress(total, total, "done"))
    return Comparison(whole_peak_bytes, loss_error, whole_gradient_error, uneven_errors, missing)


def load_torch() -> None:
    """Has torch load what it loads when first used: its threads, and the compiler behind its optimizers."""
    torch.set_num_threads(THREADS)
    torch.ones(1 << 16).exp()
    torch.optim.AdamW(build_network(seed=0).parameters())


ACTS: dict[str, Act] = {act.__name__: act for act in (try_whole, train_in_pieces, compare_without_cap)}


def _train_capped(step: Step, steps: int, digits: Digits, settings: Settings, report: Report) -> Training:
    """Sets the cap and takes `steps` of the settings' steps, or as many as the memory allows."""
    held_bytes = data_bytes()
    cap_in_force = settings.cap_bytes is not None and limit_growth(settings.cap_bytes)
    report(Progress(0, steps, f"{len(digits.labels):,} rows"))
    steps_done = 0
    meter = _meter()
    try:
        with meter:
            model = build_network(settings.seed)
            for loss in islice(train(model, step, digits, settings.steps), steps):
                steps_done += 1
                report(Progress(steps_done, steps, f"loss {loss:.3f}"))
            scores = scores_of(model, digits, settings.ub_size)
    except Exception as error:  # any error, to ask the one guard about it
        if not _is_out_of_memory(error, cap_in_force):
            raise
        return Training(cap_in_force, steps_done, str(error), held_bytes, None, {})
    return Training(cap_in_force, steps_done, None, held_bytes, meter.peak_bytes - held_bytes, scores)


def _meter() -> PeakMeter:
    """Measures data, which the cap counts, whatever else limits the process."""
    return PeakMeter(HostGauge(Currency.DATA))


def _is_out_of_memory(error: Exception, cap_in_force: bool) -> bool:
    """Whether memory ran out; where the cap is all that differs from a run that trains, a "maybe" is a yes.

    oneDNN, which computes the convolutions, gives no reason when its own allocation fails.
    """
    verdict = MemoryVerdict.YES if isinstance(error, DoesNotFitError) else memory_verdict(error)
    return verdict is MemoryVerdict.YES or (cap_in_force and verdict is MemoryVerdict.MAYBE)


def _whole_peak_bytes(digits: Digits, settings: Settings) -> int:
    with _meter() as meter:
        next(train(build_network(settings.seed), whole_step, digits, settings.steps))
    return meter.growth_bytes


def _whole_errors(digits: Digits, settings: Settings) -> tuple[float, float]:
    """How far loss and gradients of the training call are from those of the whole, relative to these."""
    model = build_network(settings.seed, torch.float64)
    step: Step = anybatch.apply(["x", "label"], ub_size=settings.ub_size)(loss_of)
    x = digits.images[: settings.compared_rows].double()
    label = digits.labels[: settings.compared_rows]
    losses: list[Tensor] = []
    whole = gradients_of(model, lambda: losses.append(whole_step(model, x, label)))
    pieces = gradients_of(model, lambda: losses.append(step(model, x=x, label=label)))
    loss, loss_in_pieces = (each.item() for each in losses)
    return abs(loss_in_pieces - loss) / abs(loss), gradient_error(pieces, whole)


def _uneven_error(way: Way, digits: Digits, settings: Settings) -> float:
    """The gradient error of a way on rows that don't divide evenly, some of them without a label."""
    model = build_network(settings.seed, torch.float64)
    x = digits.images[:UNEVEN_ROWS].double()
    draws = torch.rand(UNEVEN_ROWS, generator=torch.Generator().manual_seed(settings.seed))
    label = digits.labels[:UNEVEN_ROWS].masked_fill(draws < IGNORED_SHARE, _IGNORED)
    whole = gradients_of(model, lambda: whole_step(model, x, label))
    return gradient_error(gradients_of(model, lambda: way(model, x, label, UNEVEN_UB_SIZE)), whole)
