"""Examples of the guides are doctests, which run with the tests; the README's are run by `test_readme.py`."""

from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_of_a_guide_is_a_doctest(page: Path) -> None:
    """A guide has no Python block that nothing runs."""
    blocks = page.read_text().split("```")[1::2]
    assert all(block.startswith(("python", "py\n")) is False for block in blocks)
    assert all(">>>" in block for block in blocks if block.startswith("pycon"))
