"""Columns of the first layer of which nothing was sent: of dark pixels, of small ones, of numbers that are frozen."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks.result import NotApplicable, Reconstruction
from defenses.prune import Prune
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
    for name, value in model.named_parameters():
        value.data = (torch.rand(value.shape, generator=stream(0, name)) - 0.5) / 4
    return model


def picture() -> Tensor:
    image = (255 * torch.rand(1, 1, 8, 8, generator=stream(0, "picture"))).round() / 255
    image[0, 0, :2] = 0
    return image


def sent(image: Tensor, mask: Prune, frozen: slice | None = None) -> Reconstruction:
    model = network()
    loss = nn.functional.cross_entropy(model(image), torch.tensor([3]))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    update = {name: 0.1 * value for (name, _), value in zip(model.named_parameters(), gradient, strict=True)}
    if frozen is not None:
        update["1.weight"][:, frozen] = 0
    update = mask.transform_update(update, stream(5))  # type: ignore[arg-type, assignment]
    view = from_update(model, update, input_shape=(1, 8, 8), method=STEP, defense=mask)  # type: ignore[arg-type]
    result = attacks.build("analytic")(view)
    assert isinstance(result, Reconstruction)
    return result


@pytest.mark.parametrize("ratio", [0.1, 0.4])
def test_dark_pixels_are_told_where_a_random_mask_cannot_have_left_out_all_of_them(ratio: float) -> None:
    result = sent(picture(), Prune(ratio=ratio, keep="random"))
    assert result.inputs is not None
    assert result.verified
    assert result.note == ""
    torch.testing.assert_close(result.inputs, picture(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("ratio", "keep"), [(0.95, "random"), (0.6, "largest")])
def test_they_are_open_where_it_may_have_or_small_ones_were_left_out(
    ratio: float, keep: Literal["random", "largest"]
) -> None:
    result = sent(picture(), Prune(ratio=ratio, keep=keep))
    assert not result.verified
    assert "numbers of the input follow from what the defense let through" in result.note


def test_frozen_columns_are_no_dark_pixels() -> None:
    result = sent(picture(), Prune(ratio=0.1, keep="random"), frozen=slice(20, 30))
    assert not result.verified
    assert result.fixed is None or not bool(result.fixed.flatten()[20:30].any())


def test_a_batch_under_a_mask_is_a_limit_of_the_attack() -> None:
    """The size of what was sent is known."""
    model, images = network(), torch.rand(3, 1, 8, 8, generator=stream(0, "batch"))
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(images), torch.arange(3)), [*model.parameters()])
    whole = {name: 0.1 * value for (name, _), value in zip(model.named_parameters(), gradient, strict=True)}
    mask = Prune(ratio=0.3, keep="random")
    update = mask.transform_update(whole, stream(5))  # type: ignore[arg-type]
    view = from_update(model, update, input_shape=(1, 8, 8), batch_size=3, method=STEP, defense=mask)  # type: ignore[arg-type]
    result = attacks.build("analytic")(view)
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert "the defense left out numbers of '1'" in result.reason
