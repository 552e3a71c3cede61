"""Which modules run in a call, and which of them make one run differ from the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.fit.modules import is_noisy, watching


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.Dropout(), True),
        (nn.Dropout2d(), True),
        (nn.AlphaDropout(), True),
        (nn.LSTM(2, 2, 2, dropout=0.5), True),
        (nn.Linear(2, 2), False),
        (nn.LayerNorm(2), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_noisy_modules(module: nn.Module, expected: bool) -> None:
    """Modules whose training mode makes one run differ from the next are known as such."""
    assert is_noisy(module) == expected


def seen_while(run: Callable[[], Any]) -> list[nn.Module]:
    seen: list[nn.Module] = []
    with watching(seen.append):
        run()
    return seen


def test_watching_sees_every_module_that_runs() -> None:
    """Parents are seen before their children, each time that they run."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    model = nn.Sequential(first, second)
    assert seen_while(lambda: model(torch.ones(1, 1))) == [model, first, second]
    assert seen_while(lambda: [first(torch.ones(1, 1)) for _ in range(2)]) == [first, first]


def test_watching_ends() -> None:
    """After the block, also where it fails, nothing is seen and no hook is left."""
    hooks = nn.modules.module._global_forward_pre_hooks
    model, seen, before = nn.Linear(1, 1), [], len(hooks)
    with pytest.raises(KeyboardInterrupt), watching(seen.append):
        raise KeyboardInterrupt
    model(torch.ones(1, 1))
    assert seen == []
    assert len(hooks) == before


def test_inner_watching_takes_over() -> None:
    """In a nested block the inner watcher sees what runs, and the outer one again afterwards."""
    model, outer, inner = nn.Linear(1, 1), [], []
    with watching(outer.append):
        with watching(inner.append):
            model(torch.ones(1, 1))
        assert (len(outer), len(inner)) == (0, 1)
        model(torch.ones(1, 1))
    assert (len(outer), len(inner)) == (1, 1)


def test_watching_is_of_one_thread() -> None:
    """What another thread runs meanwhile is not seen."""
    model = nn.Linear(1, 1)

    def run_elsewhere() -> None:
        thread = threading.Thread(target=lambda: model(torch.ones(1, 1)))
        thread.start()
        thread.join()

    assert seen_while(run_elsewhere) == []
