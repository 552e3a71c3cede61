"""Bytes written for people."""

from __future__ import annotations

import pytest

from anybatch.memory.reading import in_words


@pytest.mark.parametrize(
    ("amount_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1024.0 KiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**3 // 2, "2.5 GiB"),
        (3 * 1024**5, "3072.0 TiB"),
        (-(1024**2), "-1.0 MiB"),
    ],
)
def test_in_words(amount_bytes: int, words: str) -> None:
    """Bytes come in the largest binary unit of which there is at least one, with one decimal."""
    assert in_words(amount_bytes) == words
