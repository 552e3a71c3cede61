"""Where the command starts."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command `anybatch` on the arguments of this process."""
    # Loaded here: the demo's children import this package too, and need neither typer nor rich.
    from anybatch.cli.app import app

    app()
