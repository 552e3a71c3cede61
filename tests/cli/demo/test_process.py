"""A child from the command's side: its result, its death, and that it never stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import anybatch.cli.demo.process as process
from anybatch.cli.demo.digits import load_digits, write_digits
from anybatch.cli.demo.messages import Progress, Training, encode
from anybatch.cli.demo.process import Child, ChildError
from anybatch.cli.demo.settings import Settings

TRAINING = Training(True, 4, None, 0, 1, {"accuracy": 1.0})
REPORT = "import sys; order = sys.stdin.readline(); print({line!r}, flush=True); "


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Makes every child run this code instead."""
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", code))


def run(child: Child, settings: Settings, seen: list[Progress] | None = None) -> object:
    """Runs an act in the child and collects its progress."""
    return child.run("train_in_pieces", Path("digits.pt"), settings, ([] if seen is None else seen).append)


def says(*messages: Progress | Training) -> str:
    """Code that takes its order and reports these messages."""
    lines = "\n".join(encode(each) for each in messages)
    return REPORT.format(line=lines)


def test_child_reports_progress_and_result(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress arrives in order, and the result is what the act returned."""
    steps = [Progress(0, 2, "starts"), Progress(1, 2, "loss 1")]
    stand_in(monkeypatch, says(*steps, TRAINING))
    seen: list[Progress] = []
    with Child() as child:
        assert run(child, settings, seen) == TRAINING
    assert seen == steps


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("raise ValueError('the reason')", "ValueError: the reason"),
        ("pass", "exit code 0"),
    ],
)
def test_child_without_a_result(
    code: str, ending: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that dies, or just ends, is an error that names the act, how it ended and its last words."""
    stand_in(monkeypatch, says(Progress(1, 2, "so far")) + "\n" + code)
    with Child() as child, pytest.raises(ChildError, match=f"(?s)train_in_pieces.*{ending}"):
        run(child, settings)


def test_child_that_is_dead_before_its_order(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that fails while it loads gives the same error, with what it said."""
    stand_in(monkeypatch, "raise ImportError('no such library')")
    with Child() as child:
        psutil.Process(child.process_id).wait()
        with pytest.raises(ChildError, match="no such library"):
            run(child, settings)


NOISY = """
import os
import anybatch.cli.demo.child as child
from anybatch.cli.demo.messages import Training
def act(digits, settings, report):
    print("noise from a library")
    os.system("echo noise from a program")
    return Training(True, settings.steps, None, 0, 1, {})
child.ACTS["train_in_pieces"] = act
child.main()
"""


def test_what_libraries_print_is_no_report(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real child keeps its reports apart from what others print to standard output."""
    stand_in(monkeypatch, NOISY)
    write_digits(load_digits(), tmp_path / "digits.pt")
    with Child() as child:
        result = child.run("train_in_pieces", tmp_path / "digits.pt", settings, [].append)
    assert result == Training(True, settings.steps, None, 0, 1, {})


def test_real_child_that_fails(settings: Settings, tmp_path: Path) -> None:
    """An error inside a real child comes back with its own words."""
    with Child() as child, pytest.raises(ChildError, match=r"FileNotFoundError.*missing\.pt"):
        child.run("try_whole", tmp_path / "missing.pt", settings, [].append)


def test_child_runs_with_the_allocator_that_is_announced(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc's setting, which the page names, is in the child's environment."""
    stand_in(monkeypatch, "import os; raise SystemExit(os.environ['MALLOC_MMAP_THRESHOLD_'])")
    with Child() as child, pytest.raises(ChildError, match="65536"):
        run(child, settings)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_child_does_not_outlive_the_block(
    error: type[BaseException], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the block, an interruption too, ends the child."""
    stand_in(monkeypatch, says(Progress(0, 1, "works")) + "import signal; signal.alarm(30); signal.pause()")

    def interrupt(progress: Progress) -> None:
        raise error

    child = Child()
    with pytest.raises(error), child:
        child.run("train_in_pieces", Path("digits.pt"), settings, interrupt)
    assert child._process.returncode == -signal.SIGKILL


STAGE = """
import os, signal
from rich.console import Console
# What a shell starts in the background ignores interruptions, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
import anybatch.cli.demo.stage as stage
from anybatch.cli.demo.settings import settings_for
def hold(child, *others):
    os.write(1, b"%d\\n" % child.process_id)
    child._process.wait()
stage._run = hold
stage.perform(settings_for(quick=True, cap_bytes=None), Console(quiet=True))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_no_child_stays_when_the_command_is_ended(way: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C leaves no children, nor does a kill that lets nothing be tidied."""
    command = subprocess.Popen(
        [sys.executable, "-c", STAGE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert command.stdout is not None
    children = [psutil.Process(int(command.stdout.readline())) for _ in range(3)]
    command.send_signal(way)
    gone, alive = psutil.wait_procs(children, timeout=60)
    command.communicate()
    assert command.returncode != 0
    assert (len(gone), alive) == (3, [])
    if way is signal.SIGINT:
        assert list(tmp_path.iterdir()) == []
