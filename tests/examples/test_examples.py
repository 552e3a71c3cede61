"""The examples run, learn, and are exact."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {
    "detection": ["--steps", "12"],
    "digits": ["--epochs", "2"],
    "gan": ["--steps", "101"],
    "gpt2_padded_text": ["--steps", "8"],
    "gradient_penalty": ["--steps", "30"],
    "missing_labels": ["--steps", "12"],
}


def test_all_examples_are_tested_and_listed() -> None:
    """Every file in `examples` is run below, and named in their README."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert names == sorted(SHORT)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in readme for name in names)


@pytest.mark.parametrize("name", SHORT)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example prints a table, gets better at what it does, and its gradients are those of the whole."""
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    course, report = example.main(SHORT[name])
    assert course[-1] < course[0]
    assert report.is_exact
    assert len(report.sizes) > 1
    assert report.largest_error_ratio <= 1e-10
    assert f"python examples/{name}.py" in example.__doc__
    assert "exact\n  mini-batch" in capsys.readouterr().out
