"""Amounts of memory as people write them: bytes, `"6GiB"`, or a fraction of what there is."""

import re

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?i?b)\s*", re.IGNORECASE)

Amount = int | float | str


def check_amount(amount: Amount, name: str) -> None:
    """Checks an amount of memory.

    Raises:
        ValueError: It is no amount: a negative one, a fraction above 1, a unit that is not known.
    """
    bytes_of(amount, 1 << 40, name)


def bytes_of(amount: Amount, whole_bytes: int | None, name: str) -> int | None:
    """The bytes that an amount stands for.

    Args:
        amount: An int is bytes; a float above 0 and up to 1 a fraction; a str a number with its unit.
        whole_bytes: What a fraction is a fraction of; None where that is not known.
        name: What the amount is called where it comes from.

    Returns:
        The bytes; None for a fraction of what is not known.

    Raises:
        ValueError: It is no amount.

    Example:
        >>> bytes_of("1.5KiB", None, "budget")
        1536
        >>> bytes_of(0.5, 1000, "budget")
        500
    """
    if isinstance(amount, str) and (written := _WRITTEN.fullmatch(amount)):
        return int(float(written[1]) * _UNITS[written[2].lower()])
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    if isinstance(amount, float) and 0 < amount <= 1:
        return None if whole_bytes is None else int(amount * whole_bytes)
    raise ValueError(
        f"`Auto`: `{name}` is bytes (an int), a fraction (a float above 0, up to 1) or a number with a unit. "
        f'Got {amount!r}. Pass "6GiB" or 0.8, for example.'
    )
