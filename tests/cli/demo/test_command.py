"""`anybatch demo` from its options to its exit code."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from typer.testing import CliRunner, Result

import anybatch.cli.demo.command as command
from anybatch.cli.app import app
from anybatch.cli.demo.process import ChildError
from anybatch.cli.demo.settings import MIB, Settings
from anybatch.cli.demo.stage import Outcome

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the cap")


@pytest.fixture
def performed(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings with which the acts were called, which all came out as promised without running."""
    calls: list[Settings] = []

    def perform(settings: Settings, console: object) -> Outcome:
        calls.append(settings)
        return outcome

    monkeypatch.setattr(command, "perform", perform)
    return calls


def invoke(*arguments: str) -> Result:
    """Runs `anybatch demo` in this process."""
    return CliRunner().invoke(app, ["demo", *arguments])


def words(result: Result) -> str:
    """What was printed, whatever its line breaks."""
    return " ".join(result.output.split())


@linux_only
def test_quick_demo_keeps_its_promises(tmp_path: Path) -> None:
    """The whole mini-batch really dies under the cap, micro-batches train within it, and are exact."""
    result = subprocess.run(
        [sys.executable, "-m", "anybatch.cli", "demo", "--quick", "--output", str(tmp_path / "seen")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "seen" / "demo.json").read_text())
    whole, pieces, comparison = figures["whole"], figures["pieces"], figures["comparison"]
    assert figures["rows"] == 1437
    assert whole["cap_in_force"]
    assert pieces["cap_in_force"]
    assert "you tried to allocate" in whole["out_of_memory"]
    assert whole["steps_done"] == 0
    assert pieces["out_of_memory"] is None
    assert pieces["steps_done"] == figures["settings"]["steps"]
    assert pieces["peak_bytes"] < 64 * MIB < comparison["whole_peak_bytes"]
    assert comparison["loss_error"] <= 1e-10
    assert comparison["gradient_error"] <= 1e-10
    errors = comparison["uneven_errors"]
    assert errors.pop("anybatch") <= 1e-10
    assert len(errors) == 2
    assert all(error > 0.05 for error in errors.values())
    assert all(each["kept"] for each in figures["promises"])
    assert matplotlib.image.imread(tmp_path / "seen" / "demo.png").std() > 0.1


@linux_only
def test_demo_that_does_not_fit_says_so(tmp_path: Path) -> None:
    """Under a cap that is too small for a micro-batch the demo ends with 1 and the promises that broke."""
    result = invoke("--quick", "--cap", "4", "--output", str(tmp_path))
    assert result.exit_code == 1
    assert "Broken: the micro-batches train within the cap: 0 of 5 steps, then out of memory" in words(result)


def test_demo_writes_chart_and_figures(performed: list[Settings], tmp_path: Path) -> None:
    """A run that keeps its promises ends with 0 and leaves both files in a folder that it makes."""
    result = invoke("--output", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0
    assert {file.name for file in (tmp_path / "new" / "folder").iterdir()} == {"demo.json", "demo.png"}
    assert json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())["rows"] == 1437


@linux_only
@pytest.mark.parametrize(
    ("arguments", "cap_bytes", "least_accuracy"),
    [([], 64 * MIB, 0.97), (["--quick"], 64 * MIB, None), (["--cap", "200"], 200 * MIB, 0.97)],
)
def test_options_become_settings(
    arguments: list[str],
    cap_bytes: int,
    least_accuracy: float | None,
    performed: list[Settings],
    tmp_path: Path,
) -> None:
    """The cap is in MiB; a quick run promises no accuracy and takes fewer steps than the full one's 40."""
    invoke(*arguments, "--output", str(tmp_path))
    (settings,) = performed
    assert settings.cap_bytes == cap_bytes
    assert settings.least_accuracy == least_accuracy
    assert (settings.steps < 40) == (least_accuracy is None)


def test_demo_without_a_limit_of_the_system(
    performed: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that can't limit a process goes on without the cap and says so."""
    monkeypatch.setattr(command, "can_limit_growth", lambda: False)
    result = invoke("--output", str(tmp_path))
    assert performed[0].cap_bytes is None
    assert "no cap: only Linux has a limit" in words(result)


def test_broken_promise_ends_with_1(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1 and the message names what was promised and what was seen; the files are there."""
    wrong = replace(outcome, comparison=replace(outcome.comparison, gradient_error=0.5))
    monkeypatch.setattr(command, "perform", lambda settings, console: wrong)
    result = invoke("--output", str(tmp_path))
    assert result.exit_code == 1
    assert "Broken: the gradients are the whole's, within 1e-10: 5.0e-01" in words(result)
    assert (tmp_path / "demo.json").exists()


def test_dead_child_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child without a result ends the demo with its message and without a traceback."""

    def die(settings: Settings, console: object) -> Outcome:
        raise ChildError("`demo`: try_whole ended with signal SIGKILL.")

    monkeypatch.setattr(command, "perform", die)
    result = invoke("--output", str(tmp_path))
    assert result.exit_code == 1
    assert "try_whole ended with signal SIGKILL." in words(result)
    assert "Traceback" not in result.output


def test_demo_without_scikit_learn(
    performed: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra that brings the digits nothing runs, and the message has its install line."""
    monkeypatch.setattr(command.digits, "is_installed", lambda: False)
    result = invoke("--output", str(tmp_path))
    assert result.exit_code == 1
    assert "pip install 'anybatch[demo]'" in words(result)
    assert performed == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_demo_into_what_is_no_folder(name: str, performed: list[Settings], tmp_path: Path) -> None:
    """An output folder that can't be made is refused before anything runs, naming the path."""
    (tmp_path / "file").write_text("")
    result = invoke("--output", str(tmp_path / name))
    assert result.exit_code == 1
    assert "--output must be a folder that can be written" in words(result)
    assert performed == []


def test_demo_leaves_the_logging_of_its_process_alone(performed: list[Settings], tmp_path: Path) -> None:
    """The command's own process gets no log handler; the library that adds one is loaded in a child only."""
    before = list(logging.getLogger().handlers)
    invoke("--output", str(tmp_path))
    assert logging.getLogger().handlers == before
    assert "mbp" not in sys.modules
