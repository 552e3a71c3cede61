"""Words for causes: what it is, by name, and what to do."""

from collections.abc import Sequence

import torch
from torch.nn import Module

from anybatch._verify.names import Names

_MOST_NAMES = 6


class Sentences:
    """Tells causes, with the names of modules."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def batch_norm(self, layers: Sequence[Module]) -> str:
        has_statistics = all(layer.running_mean is not None for layer in layers)
        others = ', `batch_norm="frozen"`, or put these layers in eval mode' if has_statistics else ""
        return (
            "BatchNorm in training mode takes its statistics over each micro-batch, not over the mini-batch: "
            f"{self._modules(layers)}. Use GroupNorm{others}."
        )

    def dropout(self, modules: Sequence[Module]) -> str:
        return (
            f"Dropout draws other masks for micro-batches than for the mini-batch: {self._modules(modules)}. "
            "In training that is as good; to compare exactly, put these modules in eval mode."
        )

    def same_draws(self, modules: Sequence[Module]) -> str:
        what = f": {self._modules(modules)}" if modules else ""
        return (
            f"Random numbers are drawn{what}. They came in the order of rows here, so that micro-batches "
            "drew the same as the mini-batch. Do not rely on it."
        )

    def as_near(self, ratio: float) -> str:
        return (
            f"From the float64 result the micro-batches differ by {ratio:.1e}: they are as near to it as the "
            "mini-batch whole."
        )

    def inputs(self, names: Sequence[str]) -> str:
        return (
            f"The function changes its arguments in place: {_listed(names)}. Each micro-batch is a call, and "
            "meets what the one before has left: work on copies (`x = x / 255` instead of `x /= 255`)."
        )

    def state(self, names: Sequence[str]) -> str:
        where = f": {_listed(names)}" if names else ""
        return (
            f"The function keeps state from one call to the next{where}. Each micro-batch is a call: update "
            "that state outside of the function, once per mini-batch."
        )

    def hidden_state(self) -> str:
        return (
            "The function gives another result each time, although everything in its reach is put back "
            "before: it keeps state, or draws random numbers, out of sight. As long as it does, what else "
            "there may be can't be told."
        )

    def random_numbers(self, generators: Sequence[str]) -> str:
        return (
            f"The function draws random numbers ({_listed(generators)}), others for micro-batches than for "
            "the mini-batch. Draw them before the call, and pass them as a batch argument."
        )

    def weight(self, ratio: float) -> str:
        return (
            'What `weight=` says is not what the loss is divided by: with `weight="auto"` the difference is '
            f"{ratio:.2g}. Leave `weight` out, or correct it."
        )

    def loss(self, refusal: str) -> str:
        return (
            f"The loss does not add up: {refusal}. Make it a sum or mean over rows, or say with `weight=` "
            "what it is divided by."
        )

    def rounding(self, dtype: torch.dtype, ratio: float) -> str:
        name = str(dtype).removeprefix("torch.")
        return (
            f"Rounding: in float64 the difference is {ratio:.1e}. The gradient of each micro-batch is "
            f"rounded to {name}, and so is each sum of them. Take larger micro-batches, or keep parameters "
            "in a wider dtype."
        )

    def unproved(self, note: str) -> str:
        return f"The loss can't be proved to add up: {note}. Say with `weight=` what it is divided by."

    def not_proved(self, note: str) -> str:
        return f"Not proved by `apply`: {note}."

    def unknown(self) -> str:
        return (
            "Rows depend on each other in a way that the probe did not see. Look for what the function takes "
            "over all rows that it is given: means, maxima, orders, mixtures."
        )

    def alone(self, ratio: float) -> str:
        return f"Alone it makes a difference of {ratio:.2g}."

    def _modules(self, modules: Sequence[Module]) -> str:
        return _listed([f"{self._names.of(module)} ({type(module).__name__})" for module in modules])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
