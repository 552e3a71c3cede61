"""Lists of images and of box dicts, and a loss over the number of boxes (facebookresearch/detr#354)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from anybatch.errors import InexactError, InexactWarning

from .whole import assert_whole, gradient_error, gradients, whole

BOXES = {
    "some without": [5, 0, 1, 2, 0, 0],
    "first without": [0, 0, 3, 1, 0, 2],
    "one each": [1, 1, 1, 1, 1, 1],
    "none at all": [0, 0, 0, 0, 0, 0],
}

Targets = list[dict[str, Any]]


def _images_and_boxes(boxes: list[int]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    images = [torch.randn(3, 4 + i, 5) for i in range(len(boxes))]
    targets = [{"boxes": torch.rand(n, 4), "id": f"img{i}"} for i, n in enumerate(boxes)]
    return nn.Linear(3, 4), {"images": images, "targets": targets}


def _loss(net: nn.Module, images: list[Tensor], targets: Targets) -> Tensor:
    distances = [
        (net(image.mean((1, 2)))[None] - target["boxes"]).abs().sum()
        for image, target in zip(images, targets, strict=True)
    ]
    return torch.stack(distances).sum() / max(1, _count(targets))


def _loss_by_running_sum(net: nn.Module, images: list[Tensor], targets: Targets) -> Tensor:
    total = torch.zeros(())
    for image, target in zip(images, targets, strict=True):
        total = total + (net(image.mean((1, 2)))[None] - target["boxes"]).abs().sum()
    return total / max(1, _count(targets))


def _loss_of_joined_boxes(net: nn.Module, images: list[Tensor], targets: Targets) -> Tensor:
    predicted = net(torch.stack([image.mean((1, 2)) for image in images]))
    repeats = torch.tensor([len(target["boxes"]) for target in targets])
    wanted = torch.cat([target["boxes"] for target in targets])
    return (predicted.repeat_interleave(repeats, 0) - wanted).abs().sum() / max(1, _count(targets))


def _count(targets: Targets) -> int:
    return sum(len(target["boxes"]) for target in targets)


FORMS = [_loss, _loss_by_running_sum, _loss_of_joined_boxes]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize("boxes", [BOXES[name] for name in BOXES if any(BOXES[name])], ids=str)
@pytest.mark.parametrize("ub_size", [1, 2, 3, 4, 5])
def test_boxes_with_their_count_as_weight(form: Any, boxes: list[int], ub_size: int) -> None:
    """With the number of boxes as the weight every cut gives the whole loss, also over pieces without any."""
    net, batch = _images_and_boxes(boxes)
    assert_whole(lambda images, targets: form(net, images, targets), batch, net, ub_size, weight=_box_weight)


def _box_weight(targets: Targets) -> int:
    return _count(targets)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize("boxes", BOXES.values(), ids=list(BOXES))
@pytest.mark.parametrize("ub_size", [1, 2, 3, 4, 5])
def test_boxes_without_a_weight_are_never_silently_different(
    form: Any, boxes: list[int], ub_size: int
) -> None:
    """Left to itself the call is exact, or says that it is not (Rule 1)."""
    net, batch = _images_and_boxes(boxes)
    parameters = list(net.parameters())

    def step(images: list[Tensor], targets: Targets) -> Tensor:
        return form(net, images, targets)

    expected_loss, expected = whole(step, batch, parameters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = anybatch.apply(["images", "targets"], ub_size=ub_size)(step)(**batch)
        except InexactError:
            assert gradients(parameters) == [None, None]
            return
    if not any(w.category is InexactWarning for w in caught):
        assert gradient_error(expected, gradients(parameters)) <= 1e-10
        torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)


def test_boxes_give_the_known_loss() -> None:
    """Eight boxes on six images: the sum of distances over eight."""
    net, batch = _images_and_boxes(BOXES["some without"])
    call = anybatch.apply(["images", "targets"], ub_size=2, weight=_box_weight)(
        lambda images, targets: _loss(net, images, targets)
    )
    assert call(**batch).item() == pytest.approx(2.3702894284866494, abs=1e-10)


@pytest.mark.parametrize("ub_size", [1, 2, 4, 6])
def test_strings_and_boxes_stay_with_their_image(ub_size: int) -> None:
    """Image i meets target i and its name in every piece, and each comes once (Rule 2)."""
    net, batch = _images_and_boxes(BOXES["some without"])
    seen: list[tuple[int, str]] = []

    def step(images: list[Tensor], targets: Targets) -> Tensor:
        seen.extend((image.shape[1] - 4, t["id"]) for image, t in zip(images, targets, strict=True))
        return _loss(net, images, targets)

    anybatch.apply(["images", "targets"], ub_size=ub_size, weight=_box_weight, on_inexact="ignore")(step)(
        **batch
    )
    assert seen == [(i, f"img{i}") for i in range(6)]
