"""The digits and how they are split."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sklearn import datasets

from anybatch.cli.demo import digits
from anybatch.cli.demo.digits import load_digits, read_digits, write_digits


def test_digits_are_split_without_loss_or_overlap() -> None:
    """Training and test rows together are scikit-learn's rows, each once with its label."""
    loaded = load_digits()
    images, labels = datasets.load_digits(return_X_y=True)
    ours = torch.cat([loaded.images, loaded.test_images]).flatten(1) * 16
    with_labels = torch.cat([ours, torch.cat([loaded.labels, loaded.test_labels])[:, None]], dim=1)
    theirs = torch.cat([torch.tensor(images, dtype=torch.float32), torch.tensor(labels)[:, None]], dim=1)
    assert sorted(with_labels.tolist()) == sorted(theirs.tolist())
    assert (len(loaded.labels), len(loaded.test_labels)) == (1437, 360)
    assert loaded.test_labels.unique().tolist() == list(range(10))


def test_digits_are_the_same_in_every_run() -> None:
    """The split does not depend on the random state, nor does it change it."""
    first = load_digits()
    state = torch.get_rng_state()
    torch.rand(1)
    assert torch.equal(first.labels, load_digits().labels)
    torch.set_rng_state(state)
    load_digits()
    assert torch.equal(torch.get_rng_state(), state)


def test_written_digits_are_read_back(tmp_path: Path) -> None:
    """The children get what the command has loaded."""
    loaded = load_digits()
    write_digits(loaded, tmp_path / "digits.pt")
    read = read_digits(tmp_path / "digits.pt")
    assert torch.equal(read.images, loaded.images)
    assert torch.equal(read.test_labels, loaded.test_labels)


def test_scikit_learn_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether scikit-learn is there is found out without loading it."""
    assert digits.is_installed()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "sklearn")
    assert not digits.is_installed()
