"""The command as a user meets it: names, options, help."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from anybatch.cli.app import app
from anybatch.cli.entry import main

OPTIONS = {
    "demo": {"--quick": False, "--cap": 64, "--output": "out"},
    "info": {},
}


def test_commands_and_options_are_frozen() -> None:
    """A user's script breaks when a command, an option or a default changes."""
    commands = get_command(app).commands
    found = {
        name: {option.opts[0]: option.default for option in command.params}
        for name, command in commands.items()
    }
    found["demo"]["--output"] = str(found["demo"]["--output"])
    assert found == OPTIONS


def test_help_lists_the_commands() -> None:
    """Without a command, the help lists each with a line of its own."""
    result = CliRunner().invoke(app, [])
    assert all(name in result.output for name in OPTIONS)


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--cap", "0"], ["demo", "--cap", "much"], ["demo", "--caps", "64"], ["train"], ["info", "x"]],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    """A command, option or value that does not exist is refused before anything runs."""
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_entry_point_is_the_command() -> None:
    """The installed command `anybatch` starts `main`."""
    (script,) = [each for each in entry_points(group="console_scripts") if each.name == "anybatch"]
    assert script.load() is main


@pytest.mark.parametrize("module", ["anybatch", "anybatch.cli"])
def test_module_runs_the_command(module: str) -> None:
    """`python -m anybatch` is the same command, and so is `python -m anybatch.cli`."""
    result = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in result.stdout for name in OPTIONS)


def test_children_of_the_demo_load_neither_rich_nor_typer() -> None:
    """What prints for people is not loaded where nothing is printed, nor are the others' libraries."""
    code = "import sys, anybatch.cli.demo.child; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert loaded.isdisjoint({"rich", "typer", "matplotlib", "sklearn", "mbp"})
