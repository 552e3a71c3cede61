"""Why a call differs. All suspects are switched off, then each is switched on alone: what differs is a cause.

A suspect is something that was seen: BatchNorm layers that ran in training mode, modules that drew random
numbers, arguments that changed, state that changed. What still differs with all of them switched off
comes from the loss, from random numbers outside of modules, or from state that can't be put back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anybatch._verify.kept import DEFAULT_GENERATORS
from anybatch._verify.laboratory import Laboratory, Measured
from anybatch._verify.scene import Part
from anybatch._verify.sentences import Sentences
from anybatch._verify.switches import Switch
from anybatch.exact.weights import Weights


@dataclass(frozen=True)
class Diagnosis:
    """Why a call differs.

    Attributes:
        causes: A sentence or more each.
        switched_off: Those of the causes that could be switched off, by what they are called.
        remaining_ratio: The difference that was left then; None where none could be.
        is_explained: Was that no more than is allowed?
        unproved: What could not be proved of the losses, and is no cause.
    """

    causes: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    remaining_ratio: float | None = None
    is_explained: bool = True
    unproved: tuple[str, ...] = ()

    def has(self, switch: Switch) -> bool:
        """Is it one of the causes?"""
        return switch.value in self.switched_off


def diagnose(laboratory: Laboratory, as_is: Measured, weights: Weights, sentences: Sentences) -> Diagnosis:
    """Finds the causes by experiments.

    Args:
        laboratory: Where the call is run.
        as_is: What it gave.
        weights: What the caller says of its losses.
        sentences: Words for what is found.
    """
    suspects = _suspects(laboratory)
    base = as_is if as_is.is_probed and not suspects else laboratory.measure(suspects)
    is_explained = laboratory.is_exact(base)
    if is_explained:
        found = _confirmed(laboratory, suspects)
        others: list[str] = []
    else:
        is_hidden = not laboratory.is_repeatable()
        found = dict.fromkeys(_relevant(laboratory, suspects, is_hidden))
        others = _others(laboratory, base, suspects, weights, sentences, is_hidden)
    told = [_tell(laboratory, sentences, switch, ratio) for switch, ratio in found.items()]
    names = tuple(switch.value for switch in found)
    remaining_ratio = base.difference.ratio if found else None
    unproved = tuple(note for note in _unproved(base) if sentences.unproved(note) not in others)
    return Diagnosis((*told, *others), names, remaining_ratio, is_explained, unproved)


def _suspects(laboratory: Laboratory) -> list[Switch]:
    is_suspect = {
        Switch.BATCH_NORM: bool(laboratory.wiring.batch_norms),
        Switch.DROPOUT: bool(laboratory.dropout),
        Switch.INPUTS: bool(laboratory.first.inputs),
        Switch.STATE: bool(laboratory.changed_state),
    }
    return [switch for switch, suspected in is_suspect.items() if suspected]


def _confirmed(laboratory: Laboratory, suspects: Sequence[Switch]) -> dict[Switch, float | None]:
    """The suspects that differ on their own, several with how much; all where only their company does."""
    if len(suspects) == 1:
        return {suspects[0]: None}
    alone = {
        suspect: laboratory.measure([other for other in suspects if other is not suspect])
        for suspect in suspects
    }
    found: dict[Switch, float | None] = {
        suspect: measured.difference.ratio
        for suspect, measured in alone.items()
        if not laboratory.is_exact(measured)
    }
    return found if len(found) > 1 else dict.fromkeys(found or suspects)


def _relevant(laboratory: Laboratory, suspects: Sequence[Switch], is_hidden: bool) -> list[Switch]:
    """The suspects that matter, where what remains without them hides how much they do."""
    parts = {Switch.INPUTS: Part.INPUTS, Switch.STATE: Part.STATE}

    def matters(suspect: Switch) -> bool:
        if suspect not in parts:
            return True
        others = tuple(other for other in suspects if other is not suspect)
        is_told_elsewhere = suspect is Switch.STATE and is_hidden
        return not is_told_elsewhere and laboratory.leaves_something(parts[suspect], others)

    return [suspect for suspect in suspects if matters(suspect)]


def _tell(laboratory: Laboratory, sentences: Sentences, switch: Switch, ratio: float | None) -> str:
    match switch:
        case Switch.BATCH_NORM:
            cause = sentences.batch_norm(laboratory.wiring.batch_norms)
        case Switch.DROPOUT:
            cause = sentences.dropout(laboratory.dropout)
        case Switch.INPUTS:
            cause = sentences.inputs(laboratory.first.inputs)
        case Switch.STATE:
            cause = sentences.state(laboratory.changed_state)
    return cause if ratio is None else f"{cause} {sentences.alone(ratio)}"


def _others(
    laboratory: Laboratory,
    base: Measured,
    suspects: Sequence[Switch],
    weights: Weights,
    sentences: Sentences,
    is_hidden: bool,
) -> list[str]:
    """What is left when all that has a switch is off."""
    draws = laboratory.draws_anyway and laboratory.leaves_something(Part.RANDOM, (Switch.DROPOUT,))
    causes = [sentences.random_numbers(laboratory.first.generators)] if draws else []
    causes += [sentences.hidden_state()] if is_hidden else []
    if is_hidden or (draws and not set(laboratory.first.generators) <= DEFAULT_GENERATORS):
        # The probe's runs were not comparable, and it could not know: what it says of the loss is void.
        return causes
    return causes + _of_loss(laboratory, base, suspects, weights, sentences, is_alone=not causes)


def _of_loss(
    laboratory: Laboratory,
    base: Measured,
    suspects: Sequence[Switch],
    weights: Weights,
    sentences: Sentences,
    is_alone: bool,
) -> list[str]:
    if any(rule != "auto" for rule in weights.rules):
        read = laboratory.measure(suspects, Weights("auto", ()))
        if laboratory.is_exact(read):
            return [sentences.weight(read.difference.ratio)]
    if base.refusals:
        return [sentences.loss(refusal) for refusal in base.refusals]
    if not is_alone:
        return []
    if laboratory.first.seen.lowest != torch.float64:
        ratio = laboratory.ratio_in_float64(suspects)
        if ratio is not None:
            return [sentences.rounding(laboratory.first.seen.lowest, ratio)]
    if laboratory.draws_anyway:
        # They come the same each time (the function seeds them), and still in the order of calls.
        return [sentences.random_numbers(laboratory.first.generators)]
    return [sentences.unproved(note) for note in _unproved(base)] or [sentences.unknown()]


def _unproved(base: Measured) -> tuple[str, ...]:
    """What could not be proved of the losses; where one is refused, that is all there is to say."""
    return base.pieces.unproved if base.pieces and not base.refusals else ()
