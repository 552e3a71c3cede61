"""Memory for `ub_size` rows and no more: a look at the loss that takes more rows is survived."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

from .whole import gradient_error, gradients, whole

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda z, labels: F.cross_entropy(z, labels, reduction="sum"),
    "ignored": lambda z, labels: F.cross_entropy(z, labels, ignore_index=0),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("ub_size", [1, 2, 3, 4, 5])
def test_pieces_that_just_fit_are_trained_on(form: Callable[[Tensor, Tensor], Tensor], ub_size: int) -> None:
    """With memory for `ub_size` rows and no more, a readable loss is exact, if need be with a warning."""
    net = nn.Linear(5, 4)
    parameters = list(net.parameters())
    batch = {"x": torch.randn(12, 5), "labels": torch.arange(12) % 4}

    def step(x: Tensor, labels: Tensor) -> Tensor:
        if len(x) > ub_size:
            raise torch.OutOfMemoryError(f"{len(x)} rows")
        return form(net(x), labels)

    expected_loss, expected = whole(lambda x, labels: form(net(x), labels), batch, parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anybatch.errors.InexactWarning)
        loss = anybatch.apply(["x", "labels"], ub_size=ub_size)(step)(**batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    assert gradient_error(expected, gradients(parameters)) <= 1e-10
