"""The command and its subcommands, one file each."""

from __future__ import annotations

import typer

from anybatch.cli.demo.command import demo
from anybatch.cli.info import info

__all__ = ["app"]

app = typer.Typer(
    name="anybatch",
    help="Any batch size, in the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(info)
