"""The caller's word on how pieces weigh: `weight=` of `apply`."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np
import torch

from anybatch.errors import WeightError
from anybatch.exact.law import Law

Rule = str | Callable[..., Any]
Weight = Rule | Mapping[str, Rule]
Slices = Callable[[int, int], dict[str, Any]]

_LAWS = {"rows": Law.ROWS, "sum": Law.SUM}


@dataclass(frozen=True)
class Given:
    """What the caller says of a loss: its law, and for `Law.GIVEN` the weight of some rows."""

    law: Law
    weight: float = 0.0


class Weights:
    """The rules of `weight=`, checked once."""

    def __init__(self, weight: Weight, batch_names: Sequence[str]) -> None:
        """Checks the rules.

        Raises:
            WeightError: One is neither "auto", "rows", "sum" nor a function of named batch arguments.
        """
        self._by_name = dict(weight) if isinstance(weight, Mapping) else None
        self._for_all: Rule = "auto" if isinstance(weight, Mapping) else weight
        for rule in self._by_name.values() if self._by_name is not None else (weight,):
            _check(rule, batch_names)

    @property
    def reads_graph(self) -> bool:
        """Is any loss to be read from its graph?"""
        return "auto" in self.rules

    @property
    def rules(self) -> list[Rule]:
        return list(self._by_name.values()) if self._by_name is not None else [self._for_all]

    def rules_for(self, names: Sequence[str | None]) -> list[Rule]:
        """One rule per loss.

        Raises:
            WeightError: The names are not those of the mapping.
        """
        self._check_names(names)
        if self._by_name is None:
            return [self._for_all] * len(names)
        return [self._by_name[name] for name in names if name is not None]

    def _check_names(self, names: Sequence[str | None]) -> None:
        if self._by_name is not None and set(self._by_name) != set(names):
            returned = "one loss" if None in names else f"losses named {sorted(map(str, names))}"
            raise WeightError(
                f"`weight`: a mapping has one entry for each loss that the function returns. "
                f"Got entries {sorted(self._by_name)}, and the function returned {returned}. "
                "Name each loss once."
            )


class BatchWeights:
    """The rules asked for rows of one mini-batch; what they said is kept."""

    def __init__(self, weights: Weights, cut: Slices) -> None:
        """Binds the rules to a mini-batch.

        Args:
            weights: The rules.
            cut: Gives the named arguments of rows `start` to `stop`, on the host.
        """
        self._weights = weights
        self._cut = cut
        self._said: dict[tuple[int, int, int], float] = {}

    def given(self, names: Sequence[str | None], start: int, stop: int) -> list[Given | None]:
        """What the rules say of rows `start` to `stop`, for each loss.

        Args:
            names: The losses' names; None for a function that returns one loss.
            start: The first row.
            stop: The row after the last.

        Raises:
            WeightError: The names are not those of the mapping, or a function returns no weight.
        """
        return [self._given(rule, start, stop) for rule in self._weights.rules_for(names)]

    def check_adds_up(self, sizes: Sequence[int]) -> None:
        """Evaluates the callables on every piece and on the whole, before anything runs.

        Raises:
            WeightError: One returns no weight, or weights that don't add up over rows.
        """
        for rule in self._weights.rules:
            if callable(rule):
                self._check_adds_up(rule, sizes)

    def _check_adds_up(self, rule: Callable[..., Any], sizes: Sequence[int]) -> None:
        stops = list(accumulate(sizes))
        total = sum(self._ask(rule, stop - rows, stop) for rows, stop in zip(sizes, stops, strict=True))
        whole = self._ask(rule, 0, stops[-1])
        if not math.isclose(total, whole, rel_tol=1e-6, abs_tol=1e-12):
            raise WeightError(
                f"`weight`: weights add up over rows, as counts do. Got {whole:g} for the whole mini-batch "
                f"and {total:g} for its {len(sizes)} pieces together. Return a count or a sum, not a mean."
            )

    def _given(self, rule: Rule, start: int, stop: int) -> Given | None:
        if isinstance(rule, str):
            return None if rule == "auto" else Given(_LAWS[rule])
        return Given(Law.GIVEN, self._ask(rule, start, stop))

    def _ask(self, rule: Callable[..., Any], start: int, stop: int) -> float:
        key = (id(rule), start, stop)
        if key not in self._said:
            self._said[key] = _evaluate(rule, self._cut(start, stop))
        return self._said[key]


def _check(rule: Any, batch_names: Sequence[str]) -> None:
    if isinstance(rule, str) and rule in ("auto", *_LAWS):
        return
    if not callable(rule):
        raise WeightError(
            '`weight`: a rule is "auto", "rows", "sum" or a function of named batch arguments. '
            f'Got {rule!r}. Pass "rows" for a mean over rows, for example.'
        )
    unknown = [name for name in _wanted(rule, batch_names) if name not in batch_names]
    if unknown:
        raise WeightError(
            "`weight`: a function takes batch arguments by their names. "
            f"Got one that asks for {unknown}, and the names are {list(batch_names)}. Rename its parameters."
        )


def _wanted(rule: Callable[..., Any], batch_names: Sequence[str]) -> list[str]:
    parameters = inspect.signature(rule).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(batch_names)
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _evaluate(rule: Callable[..., Any], arguments: dict[str, Any]) -> float:
    wanted = _wanted(rule, list(arguments))
    value = rule(**{name: arguments[name] for name in wanted})
    is_single = isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1
    number = value.item() if is_single else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise WeightError(
            f"`weight`: a function returns one number. Got {value!r} ({type(value).__name__}). "
            "Return a count, as `(label != -100).sum()` is."
        )
    if not math.isfinite(float(number)) or float(number) < 0:
        raise WeightError(
            f"`weight`: a weight is finite and not negative. Got {float(number)}. Return a count or a sum."
        )
    return float(number)
