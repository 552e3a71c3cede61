"""The public surface: names, signature, what an import costs and does, and what is not there yet."""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anybatch

IMPORT_REPORT = """
import json, logging, os, sys, time, warnings
import torch

def state():
    loggers = [name for name, l in logging.root.manager.loggerDict.items() if getattr(l, "handlers", [])]
    return {
        "environment": dict(os.environ),
        "handlers": [logging.root.level, len(logging.root.handlers), loggers],
        "filters": [str(f) for f in warnings.filters],
        "random": torch.get_rng_state().tolist(),
        "device": torch.cuda.is_initialized(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
    }

before, modules = state(), set(sys.modules)
begin = time.process_time()
import anybatch
cost_s = time.process_time() - begin
after = state()
print(json.dumps({
    "cost_s": cost_s,
    "changed": [name for name in before if before[name] != after[name]],
    "modules": sorted(set(sys.modules) - modules),
}))
"""
HEAVY = {"matplotlib", "rich", "typer", "click", "sklearn", "transformers", "scipy", "pandas", "mbp", "tqdm"}


def _report_of_import(bytecode: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_REPORT], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == 1, "the import printed something"
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a few fresh interpreters saw of the import, the package once compiled to bytecode as installed."""
    bytecode = tmp_path_factory.mktemp("bytecode")
    return [_report_of_import(bytecode) for _ in range(4)][1:]


def test_public_names_are_frozen() -> None:
    """`__all__` holds what the design promises, and each name is there."""
    assert sorted(anybatch.__all__) == [
        "Auto",
        "MemoryMonitor",
        "Verification",
        "apply",
        "errors",
        "techniques",
        "verify",
    ]
    assert all(hasattr(anybatch, name) for name in anybatch.__all__)


def test_names_for_users_own_tests_are_frozen() -> None:
    """`anybatch.testing` is a module of its own, and its functions keep their arguments."""
    import anybatch.testing

    assert sorted(anybatch.testing.__all__) == ["Fault", "fail_at", "memory_limit"]
    assert list(inspect.signature(anybatch.testing.fail_at).parameters) == ["n", "where"]
    assert list(inspect.signature(anybatch.testing.memory_limit).parameters) == ["growth_bytes", "malloc"]


def test_signature_of_apply_is_frozen() -> None:
    """The arguments of `apply`, their order, kinds and defaults do not change."""
    parameters = inspect.signature(anybatch.apply).parameters.values()
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert [(p.name, p.kind, p.default) for p in parameters] == [
        ("batch_names", positional, inspect.Parameter.empty),
        ("ub_size", positional, 1),
        ("device", positional, None),
        ("device_ids", positional, None),
        ("weight", keyword, "auto"),
        ("on_inexact", keyword, "raise"),
        ("batch_dim", keyword, 0),
        ("whole_batch_loss", keyword, None),
        ("batch_norm", keyword, "micro"),
        ("scaler", keyword, None),
    ]


def test_import_is_silent(reports: list[dict[str, Any]]) -> None:
    """Importing changes no environment, logging, warning filter, random state, dtype or device (Rule 6)."""
    assert [report["changed"] for report in reports] == [[]] * len(reports)


def test_import_loads_nothing_heavy(reports: list[dict[str, Any]]) -> None:
    """Drawing, the command line and other people's models load when used (Rule 6)."""
    loaded = {name.split(".")[0] for name in reports[0]["modules"]}
    assert loaded & HEAVY == set()
    assert "anybatch" in loaded


def test_import_costs_less_than_50_ms(reports: list[dict[str, Any]]) -> None:
    """`import anybatch` adds less than 50 ms of processor time to `import torch` (Rule 6)."""
    assert statistics.median(report["cost_s"] for report in reports) < 0.050


LATER: dict[str, dict[str, Any]] = {
    "whole_batch_loss": {"whole_batch_loss": torch.mean},
    "batch_norm exact": {"batch_norm": "exact"},
}


@pytest.mark.parametrize("options", LATER.values(), ids=list(LATER))
def test_option_of_a_later_version_says_so(options: dict[str, Any]) -> None:
    """What the signature promises and this version lacks is a `NotImplementedError` that names the option."""
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        anybatch.apply(["x"], **options)


@pytest.mark.parametrize("ub_size", [0, -1, True, False, 2.5, 8.0, None, "8", "many"])
def test_bad_size_is_refused_at_decoration(ub_size: Any) -> None:
    """A micro-batch size that is no positive whole number is a `ValueError` before any call."""
    with pytest.raises(ValueError, match="ub_size"):
        anybatch.apply(["x"], ub_size=ub_size)


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "on_inexact": {"on_inexact": "shout"},
    "weight": {"weight": "tokens"},
    "batch_norm": {"batch_norm": "loud"},
}


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=list(BAD_OPTIONS))
def test_unknown_option_value_is_refused_at_decoration(options: dict[str, Any]) -> None:
    """A value that no option has is refused before any call, naming the option."""
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        anybatch.apply(["x"], **options)


@pytest.mark.parametrize("names", [["x", "x"], [1], [], "x", None], ids=str)
def test_bad_names_are_refused_at_decoration(names: Any) -> None:
    """Names that are no distinct strings are refused before any call."""
    with pytest.raises((ValueError, TypeError), match="batch_names"):
        anybatch.apply(names)


def _decorators() -> dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]]:
    return {
        "two positional": anybatch.apply(["x"], 4),
        "size by keyword": anybatch.apply(["x"], ub_size=4),
        "names by keyword": anybatch.apply(batch_names=["x"], ub_size=4),
        "names as a tuple": anybatch.apply(("x",), 4),
    }


@pytest.mark.parametrize(
    "spelling", ["two positional", "size by keyword", "names by keyword", "names as a tuple"]
)
def test_spellings_of_the_decorator(spelling: str) -> None:
    """The decorator takes positions or keywords, and keeps the function's name and docstring."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def train(x: Tensor) -> Tensor:
        """Train a little."""
        return (weight * x).mean()

    decorated = _decorators()[spelling](train)
    assert decorated.__name__ == "train"
    assert decorated.__doc__ == "Train a little."
    assert decorated(torch.arange(6.0, dtype=torch.float64)).item() == pytest.approx(2.5)
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2.5)
