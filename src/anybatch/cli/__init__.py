"""The command `anybatch`: parse the arguments, call the library, print."""

from anybatch.cli.entry import main

__all__ = ["main"]
