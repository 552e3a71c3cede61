"""The README's examples run as they stand."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_every_example_of_the_readme_runs() -> None:
    """The Python blocks of the README run one after the other, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["output"].shape == (1000, 5)
    assert names["model"][0].weight.grad is not None
    names["counted"](x=names["x"], label=names["label"])
    assert set(names["several"](x=names["x"], label=names["label"])) == {"class", "size"}
