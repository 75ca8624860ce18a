"""Linear layers whose weight is a parameter under a mask (pruned networks) or times a constant (equalized rates)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from attacks.base import NotApplicable, Reconstruction, build
from fl.capture import from_batch, from_update
from fl.runtime.user_code import global_generator
from fl.seeds import stream

PIXELS, CLASSES = 48, 5
IMAGES = torch.randint(256, (2, 3, 4, 4), generator=stream(0, "images")) / 255


class Scaled(nn.Module):
    """A perceptron whose first weight `change` changes before each use."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.first, self.last = nn.Linear(PIXELS, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(x.flatten(1), self.change(self.first.weight), self.first.bias).relu())


def pruned(share: float) -> nn.Module:
    with global_generator(1):
        model = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 24), nn.ReLU(), nn.Linear(24, CLASSES))
        prune.random_unstructured(model[1], "weight", share)
    return model


def changed(change: Callable[[Tensor], Tensor]) -> nn.Module:
    with global_generator(1):
        return Scaled(change)


HALF = (torch.rand(24, PIXELS, generator=stream(0, "mask")) < 0.5).float()
COLUMNS = torch.linspace(0.5, 2, PIXELS)


@pytest.mark.parametrize(
    "model",
    [
        pruned(0.3),
        changed(lambda weight: weight * HALF),
        changed(lambda weight: 0.3 * weight),
        changed(lambda weight: weight * COLUMNS),
    ],
    ids=["prune", "mask", "constant", "columns"],
)
def test_the_picture_follows_from_the_numbers_that_take_part(model: nn.Module) -> None:
    view, _ = from_batch(model, IMAGES[:1], torch.tensor([1]))
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert torch.allclose(result.inputs, IMAGES[:1], atol=1e-5)
    assert result.verified


def test_pixels_without_a_weight_are_open() -> None:
    view, _ = from_batch(pruned(0.95), IMAGES[:1], torch.tensor([1]))
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert not result.verified
    assert "numbers of the input follow from the numbers of the weight that are not masked" in result.note
    right = (result.inputs - IMAGES[:1]).abs() < 1e-5
    assert int(re.match(r"\d+", result.note).group()) <= int(right.sum()) < PIXELS


@pytest.mark.parametrize("model", [pruned(0.3), changed(lambda w: 0.3 * w)], ids=["prune", "constant"])
def test_two_pictures_stated_as_one_are_not_confirmed(model: nn.Module) -> None:
    loss = functional.cross_entropy(model(IMAGES), torch.tensor([1, 1]))
    names = [name for name, _ in model.named_parameters()]
    update = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    view = from_update(model, update, input_shape=(3, 4, 4), num_classes=CLASSES, batch_size=1, kind="gradient")
    result = build("analytic")(view)
    assert isinstance(result, NotApplicable) or not result.verified


def test_a_batch_behind_a_mask_is_refused() -> None:
    view, _ = from_batch(pruned(0.3), IMAGES, torch.tensor([1, 2]))
    result = build("analytic")(view)
    assert isinstance(result, NotApplicable)
    assert "take no part (pruned, say)" in result.reason


@pytest.mark.parametrize(
    "change",
    [lambda w: w.abs(), lambda w: w / w.norm(), lambda w: w - w.mean(), lambda w: w * (w.abs() > 0.05)],
    ids=["sizes", "normalized", "centered", "thresholded"],
)
def test_weights_computed_otherwise_are_passed_over(change: Callable[[Tensor], Tensor]) -> None:
    view, _ = from_batch(changed(change), IMAGES[:1], torch.tensor([1]))
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is None  # features of the layer above


class Computed(nn.Linear):
    """A layer whose weight is computed before it is used, by a function that is not followed."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(PIXELS, 24)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.change(self.weight), self.bias)


def fake_quantized(weight: Tensor) -> Tensor:
    step = float(weight.detach().abs().max()) / 127
    return torch.fake_quantize_per_tensor_affine(weight, step, 0, -128, 127)


def behind(change: Callable[[Tensor], Tensor]) -> nn.Module:
    with global_generator(1):
        return nn.Sequential(nn.Flatten(), Computed(change), nn.ReLU(), nn.Linear(24, CLASSES))


@pytest.mark.parametrize(("name", "count"), [("analytic", 1), ("analytic", 2), ("spear", 1)])
def test_a_layer_that_rounds_its_weight_is_read_before_plain_ones_above_it(name: str, count: int) -> None:
    view, _ = from_batch(behind(fake_quantized), IMAGES[:count], torch.arange(count))
    found = build(name)(view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert found.inputs is not None
    far = (found.inputs[:, None] - IMAGES[None, :count]).abs().amax((2, 3, 4))
    assert bool((far.amin(1) < 1e-3).all())


@pytest.mark.parametrize("change", [lambda weight: weight**3, lambda weight: weight - weight.mean(1, keepdim=True)])
def test_a_layer_whose_weight_has_another_gradient_than_its_own_is_not_read_as_plain(
    change: Callable[[Tensor], Tensor],
) -> None:
    view, _ = from_batch(behind(change), IMAGES[:1], torch.tensor([1]))
    found = build("analytic")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is None
    assert found.verified is not False
