"""What a layer takes is read off sparsified and quantized updates and off signs, of one example alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn

from attacks.analytic.compressed_layer import CompressedInput, Reading, is_on_grid, read_compressed_layer
from attacks.result import NotApplicable
from attacks.update.quantization_grids import grid_step
from defenses.prune import Prune
from defenses.qsgd import QSGD
from defenses.quantize import Quantize
from fl.capture import from_update
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import Tensors
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)
DEFENSES = {
    "top 5 %": Prune(ratio=0.95),
    "top 20 % of all": Prune(ratio=0.8, scope="global"),
    "random 30 %": Prune(ratio=0.7, keep="random"),
    "8 bits": Quantize(bits=8),
    "5 bits": Quantize(bits=5),
    "8 bits, at random": Quantize(bits=8, rounding="stochastic"),
    "qsgd": QSGD(bits=8, norm="max"),
}


def wide_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensors:
    found = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def view_of(model: nn.Module, update: Tensors, method: FedAvg = STEP) -> ServerView:
    return from_update(model, update, input_shape=support.SHAPE, method=method, batch_size=1)


def read(update: Tensors, defense: Defense) -> Reading:
    sent = defense.transform_update(update, stream(0, "sent"))
    return read_compressed_layer(view_of(wide_network(), sent))


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize("centered", [False, True])
def test_one_input_is_read_up_to_a_factor(name: str, centered: bool) -> None:
    model, (inputs, labels) = wide_network(), support.examples(1)
    inputs = 2 * inputs - 1 if centered else inputs
    found = read(gradient(model, inputs, labels), DEFENSES[name])
    assert isinstance(found, CompressedInput), found
    assert found.is_given_images
    true, values = inputs.flatten().double()[found.told], found.values[found.told]
    scaled = values * (values @ true) / values.square().sum()
    assert float((scaled - true).norm() / true.norm()) <= max(found.error, 1e-3)
    assert bool(found.told.all()) == (not name.startswith("top"))


@pytest.mark.parametrize("name", DEFENSES)
def test_several_are_taken_for_no_one(name: str) -> None:
    model, (inputs, labels) = wide_network(), support.examples(3)
    found = read(gradient(model, inputs, labels), DEFENSES[name])
    assert not isinstance(found, CompressedInput)


def test_what_is_not_compressed_is_not_read() -> None:
    model, (inputs, labels) = wide_network(), support.examples(1)
    update = gradient(model, inputs, labels)
    assert read_compressed_layer(view_of(model, update)) is None
    noisy = {name: value + 0.01 * torch.randn(value.shape, generator=stream(0, name)) for name, value in update.items()}
    assert read_compressed_layer(view_of(model, noisy)) is None
    sent = DEFENSES["8 bits"].transform_update(update, None)
    for other in (replace(view_of(model, sent), batch_size=2), view_of(model, sent, replace(STEP, steps=2))):
        assert read_compressed_layer(other) is None


def test_too_few_bits_are_said_to_be_too_few() -> None:
    model, (inputs, labels) = wide_network(), support.examples(1)
    found = read(gradient(model, 2 * inputs - 1, labels), Quantize(bits=2))
    assert isinstance(found, NotApplicable)
    assert found.reason == "numbers sent in few bits (4 values), too few to tell what '1' takes"


def test_signs_tell_on_which_side_of_zero_an_input_is() -> None:
    model, (inputs, labels) = wide_network(), support.examples(1)
    signs = {name: value.sign() for name, value in gradient(model, 2 * inputs - 1, labels).items()}
    scaled = {name: (1 + number) * value for number, (name, value) in enumerate(signs.items())}
    for sent in (signs, scaled):
        found = read_compressed_layer(view_of(model, sent))
        assert isinstance(found, CompressedInput)
        assert found.signs_only
        agree = float((found.values == (2 * inputs - 1).flatten().sign()).double().mean())
        assert agree in {0.0, 1.0}
    positive = {name: value.sign() for name, value in gradient(model, inputs, labels).items()}
    found = read_compressed_layer(view_of(model, positive))
    assert isinstance(found, NotApplicable)
    assert "has one sign nearly everywhere" in found.reason
    several = {name: value.sign() for name, value in gradient(model, *support.examples(3)).items()}
    assert isinstance(read_compressed_layer(view_of(model, several)), NotApplicable)


def test_signs_with_sizes_of_rows_are_no_input() -> None:
    """They are an outer product, of whatever sizes the rows have and of an input of one size."""
    model, (inputs, labels) = wide_network(), support.examples(1)
    update = gradient(model, inputs, labels)
    rows = {n: v.sign() * v.abs().flatten(1).mean(1)[:, None] if v.ndim > 1 else v for n, v in update.items()}
    for defense in (Prune(ratio=0.5, keep="random"), Quantize(bits=8)):
        assert not isinstance(read(rows, defense), CompressedInput)


def test_pixels_of_eight_bits_times_one_number_are_no_rounded_update() -> None:
    """The gradient of one logit has 256 values, as have its pixels."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1))
    image = (255 * torch.rand(1, 3, 32, 32, generator=stream(0, "picture"))).round() / 255
    loss = nn.functional.binary_cross_entropy_with_logits(model(image), torch.ones(1, 1))
    update = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    view = from_update(model, update, input_shape=(3, 32, 32), loss="bce", method=STEP, batch_size=1)
    assert grid_step(update["1.weight"].flatten()) > 0
    assert not is_on_grid(view)
    reading = read_compressed_layer(view)
    assert "few bits" not in getattr(reading, "reason", "")
