"""The experiments: runs of the call under conditions, each of which begins with the same scene."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn import Module

from anybatch._verify import comparison, runs
from anybatch._verify.comparison import NO_RUN, Difference, Limit, difference
from anybatch._verify.double import doubled
from anybatch._verify.draws import Draws, watch
from anybatch._verify.runs import Outcome, Seen
from anybatch._verify.scene import Part, Scene
from anybatch._verify.subject import Subject, in_double
from anybatch._verify.switches import Switch, Wiring, switched
from anybatch.errors import InexactError
from anybatch.exact.batch_norm import batch_norms
from anybatch.exact.weights import Weights

# What backward starts from in further runs, whose gradients are rounded otherwise. Exact in any dtype, and
# below 1, so that nothing overflows.
_OTHER_SEEDS = (0.625, 0.75, 0.875)


@dataclass(frozen=True, eq=False)
class First:
    """The first run of the call whole, as it is.

    Attributes:
        outcome: Its numbers.
        seen: The modules that ran, and the lowest dtype.
        inputs: Arguments that it changed, by name.
        state: Variables, buffers and attributes that it changed, by name.
        generators: Random generators that moved, by name.
    """

    outcome: Outcome
    seen: Seen
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    generators: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """The call in micro-batches against the call whole.

    Attributes:
        whole: The numbers of the one.
        pieces: Those of the other; None where it could not be run.
        refusals: Why the loss was found not to add up, if it was.
        is_probed: Was the loss examined?
    """

    whole: Outcome
    pieces: Outcome | None
    refusals: tuple[str, ...] = ()
    is_probed: bool = True

    @cached_property
    def difference(self) -> Difference:
        return NO_RUN if self.pieces is None else difference(self.whole, self.pieces)


class Laboratory:
    """Runs the call under conditions.

    Attributes:
        names: What tensors and modules are called.
        first: The call whole, as it is.
    """

    def __init__(self, subject: Subject, scene: Scene) -> None:
        self._subject = subject
        self._scene = scene
        self.names = scene.names
        seen = Seen()
        with scene.undone():
            outcome = runs.whole(subject, scene, seen)
            inputs, state, generators = (
                tuple(scene.changed_inputs()),
                tuple(scene.changed_state()),
                tuple(scene.moved_generators()),
            )
        self.first = First(outcome, seen, inputs, state, generators)

    @cached_property
    def _draws(self) -> Draws:
        return self._watched(())

    @cached_property
    def _draws_anyway(self) -> Draws:
        return self._watched(self._draws.modules)

    def _watched(self, stopped: Iterable[Module]) -> Draws:
        """Who draws random numbers when some modules are stopped from it."""
        if not self.first.generators:
            return Draws()
        with self._scene.undone():
            subject = switched(self._subject, self._scene, [Switch.DROPOUT], Wiring(drawing=tuple(stopped)))
            return watch(subject, self._scene)

    @property
    def dropout(self) -> tuple[Module, ...]:
        """The modules that draw random numbers when they train, and only then."""
        return tuple(module for module in self._draws.modules if module not in self._draws_anyway.modules)

    @property
    def draws_anyway(self) -> bool:
        """Are random numbers drawn although dropout is off?"""
        return self._draws_anyway.is_outside or bool(self._draws_anyway.modules)

    @cached_property
    def wiring(self) -> Wiring:
        """What the switches act on."""
        return Wiring(tuple(batch_norms(self.first.seen.modules)), self.dropout)

    @property
    def changed_state(self) -> tuple[str, ...]:
        """What of the state the call changes, running statistics apart."""
        statistics = {
            self.names.of(buffer)
            for layer in self.wiring.batch_norms
            for buffer in layer.buffers(recurse=False)
            if buffer in self.names
        }
        return tuple(name for name in self.first.state if name not in statistics)

    def measure_as_is(self) -> Measured:
        """The user's call; a refused loss is weighted by rows, so that there are numbers."""
        if self._subject.settings.on_inexact == "ignore":
            return Measured(self.first.outcome, self._in_pieces(self._subject, ()), is_probed=False)
        return self._measured(self.first.outcome, self._subject, ())

    def measure(self, off: Iterable[Switch], weights: Weights | None = None) -> Measured:
        """The call with some things switched off, with the probe, and perhaps with other weights."""
        off = tuple(off)
        settings = self._subject.settings
        subject = replace(self._subject, settings=replace(settings, weights=weights or settings.weights))
        return self._measured(self._whole(off), subject, off)

    def _measured(self, expected: Outcome, subject: Subject, off: tuple[Switch, ...]) -> Measured:
        try:
            return Measured(expected, self._in_pieces(_told(subject, "raise"), off))
        except InexactError as error:
            refusals = error.causes or (str(error),)
        try:
            return Measured(expected, self._in_pieces(_told(subject, "warn"), off), refusals)
        except InexactError:
            return Measured(expected, None, refusals)

    def _in_pieces(self, subject: Subject, off: tuple[Switch, ...]) -> Outcome:
        with self._scene.undone():
            return runs.in_pieces(self._switched(subject, off), self._scene)

    def _whole(self, off: tuple[Switch, ...], seed: float = 1.0) -> Outcome:
        with self._scene.undone():
            return runs.whole(self._switched(self._subject, off), self._scene, seed=seed)

    def _switched(self, subject: Subject, off: tuple[Switch, ...]) -> Subject:
        return switched(subject, self._scene, off, self.wiring) if off else subject

    def leaves_something(self, part: Part, off: tuple[Switch, ...] = ()) -> bool:
        """Does the call whole give something else on what a first run has left of one part of the scene?"""
        with self._scene.undone():
            subject = self._switched(self._subject, off)
            begin = self._scene.again()
            first = runs.whole(subject, self._scene)
            begin.restore_all_but(part)
            second = runs.whole(subject, self._scene)
        return not self.is_allowed(difference(first, second))

    def is_repeatable(self) -> bool:
        """Does the call whole give the same once everything in reach is put back?"""
        return self.is_allowed(difference(self.first.outcome, self._whole(())))

    def is_exact(self, measured: Measured) -> bool:
        """Was no loss refused, and is the difference within what Rule 1 allows?"""
        is_near = self.is_allowed(measured.difference) or self.nearness(measured) is not None
        return is_near and not measured.refusals

    def is_allowed(self, found: Difference) -> bool:
        """Is the difference within what Rule 1 allows?"""
        return found.ratio <= self.limit_for(found).ratio

    def nearness(self, measured: Measured) -> float | None:
        """How far the micro-batches lie from the float64 result, if that is within what is allowed.

        Two results that are each within their rounding error of the true one can be further apart.
        """
        if self.limit_for(measured.difference) is not self._limit:
            return None
        if self._in_float64 is None or measured.pieces is None:
            return None
        ratio = difference(self._in_float64, measured.pieces).ratio
        return ratio if ratio <= self._limit.ratio else None

    def limit_for(self, found: Difference) -> Limit:
        """What Rule 1 allows. Further runs are made only where what is known allows less than was found."""
        least = comparison.least_limit(self.first.seen.lowest)
        if found.ratio <= least.ratio:
            return least
        return self._limit_of_one if found.ratio <= self._limit_of_one.ratio else self._limit

    @cached_property
    def _limit_of_one(self) -> Limit:
        return comparison.limit(self.first.seen.lowest, [self._own_error(1.0)])

    @cached_property
    def _limit(self) -> Limit:
        lowest, first = self.first.seen.lowest, self._own_error(1.0)
        if not comparison.is_rounding(lowest, first):
            return self._limit_of_one
        return comparison.limit(lowest, [first, *map(self._own_error, _OTHER_SEEDS)])

    def _own_error(self, seed: float) -> float | None:
        """How far the call whole lies from itself in float64, both without dropout; None where not known."""
        expected = self._in_float64 if seed == 1.0 else self._wide(seed)
        if expected is None:
            return None
        return difference(expected, self._whole(self._without_dropout, seed)).ratio

    @property
    def _without_dropout(self) -> tuple[Switch, ...]:
        return (Switch.DROPOUT,) if self.first.generators else ()

    @cached_property
    def _in_float64(self) -> Outcome | None:
        return self._wide(1.0)

    def _wide(self, seed: float) -> Outcome | None:
        """The call whole, without dropout, in float64; None where it has been, or can't be, run so."""
        if self.first.seen.lowest == torch.float64:
            return None
        seen = Seen()
        try:
            with self._scene.undone():
                wide = in_double(self._switched(self._subject, self._without_dropout))
                with doubled(self._scene):
                    outcome = runs.whole(wide, Scene(wide), seen, seed)
        except Exception:  # a function may insist on its dtype, and a device may have no float64
            return None
        return outcome if seen.lowest == torch.float64 else None

    def ratio_in_float64(self, off: Iterable[Switch]) -> float | None:
        """The difference in float64 with some things switched off; None where it is none, or can't be had."""
        try:
            with in_float64(self._subject, self._scene) as wide:
                measured = wide.measure(off)
                return measured.difference.ratio if wide.is_exact(measured) else None
        except Exception:  # as above
            return None


@contextmanager
def in_float64(subject: Subject, scene: Scene) -> Iterator[Laboratory]:
    """A laboratory for the call in float64 throughout."""
    with scene.undone():
        wide = in_double(subject)
        with doubled(scene):
            yield Laboratory(wide, Scene(wide))


def _told(subject: Subject, on_inexact: str) -> Subject:
    return replace(subject, settings=replace(subject.settings, on_inexact=on_inexact))
