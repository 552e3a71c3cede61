"""A process that runs one act: it loads what it needs, waits for its order, reports, and ends.

It takes its order as a line of JSON on standard input, which the command holds open: when the command
dies, that input ends, and a child that waits ends too. Reports go to what was standard output at the start, a
line each; what others print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from anybatch.cli.demo.acts import ACTS, load_torch
from anybatch.cli.demo.digits import read_digits
from anybatch.cli.demo.messages import Message, encode
from anybatch.cli.demo.settings import Settings

__all__ = ["main", "order_line"]


def order_line(act: str, digits_file: Path, settings: Settings) -> str:
    """The order to run an act, as one line without its end."""
    return json.dumps({"act": act, "digits_file": str(digits_file), "settings": asdict(settings)})


def main() -> None:
    """Waits for an order on standard input and carries it out."""
    channel = _private_channel()
    load_torch()
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    settings = Settings(**order["settings"])

    def report(message: Message) -> None:
        print(encode(message), file=channel, flush=True)

    report(ACTS[order["act"]](read_digits(Path(order["digits_file"])), settings, report))


def _private_channel() -> TextIO:
    """What was standard output, out of the reach of libraries that print."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


if __name__ == "__main__":
    main()
