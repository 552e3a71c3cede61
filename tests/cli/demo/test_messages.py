"""Messages from a child to the command."""

from __future__ import annotations

import math

import pytest

from anybatch.cli.demo.messages import Comparison, Message, Progress, Training, decode, encode


@pytest.mark.parametrize(
    "message",
    [
        Progress(3, 40, "loss 0.123\nand a second line"),
        Training(True, 0, "can't allocate memory", 5 << 20, None, {}),
        Training(False, 40, None, 5 << 20, 7 << 20, {"accuracy": 0.99}),
        Comparison(9 << 20, 0.0, 1e-16, {"anybatch": 1e-16, "loop": math.inf}, {"other": "not installed"}),
    ],
)
def test_a_message_survives_the_pipe(message: Message) -> None:
    """What a child says is one line, and arrives as it was."""
    line = encode(message)
    assert "\n" not in line
    assert decode(line) == message
