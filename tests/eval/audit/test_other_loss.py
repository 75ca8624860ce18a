"""An update that given images make under another loss than stated: the audit says that the loss is what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from fl.seeds import stream

LABELS = torch.tensor([1, 3])
WEIGHTS = torch.linspace(0.2, 3, 10)


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, label_smoothing=0.2)


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, weight=WEIGHTS)


def network() -> nn.Module:
    return initialized(nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10))).float()


def pictures(count: int) -> Tensor:
    return (torch.rand(count, 3, 4, 4, generator=stream(0, "pictures")) * 255).round() / 255


def mismatch(
    loss: Callable[[Tensor, Tensor], Tensor], count: int, *, wrong: bool = False, trained: Tensor = LABELS
) -> str:
    model, images, labels = network(), pictures(count), LABELS[:count]
    loss(model(images), trained[:count]).backward()
    update = {name: 0.1 * value.grad for name, value in model.named_parameters()}
    given = 1 - images if wrong else images
    return hyperleak.audit(
        network(), given, labels, update=update, batch_size=count, attacks=[{"name": "ig", "iterations": 1}]
    ).mismatch


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("loss", [smoothed, weighted])
def test_another_loss_is_named_where_the_images_are_right(loss, count: int) -> None:
    if loss is weighted and count == 1:
        assert mismatch(loss, count) == ""  # one weight is a step size
    else:
        assert "state the loss that was trained with" in mismatch(loss, count)


def test_the_loss_is_not_blamed_for_wrong_images() -> None:
    said = mismatch(smoothed, 2, wrong=True)
    assert "is not what this model makes of these images" in said
    assert "state the loss that was trained with" not in said


@pytest.mark.parametrize("count", [1, 2])
def test_other_labels_are_named_in_place_of_another_loss(count: int) -> None:
    said = mismatch(functional.cross_entropy, count, trained=LABELS.flip(0))
    found, given = (", ".join(map(str, labels[:count].tolist())) for labels in (LABELS.flip(0), LABELS))
    assert f"makes it with other labels, {found} in place of {given}" in said
    assert "loss that was trained with" not in said
