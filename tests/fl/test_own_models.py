"""Models of users that are out of the ordinary: taken as they are, or refused for what is the matter with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks.base import NotApplicable, Reconstruction
from fl.capture import from_batch, from_update
from fl.predict import predict
from fl.seeds import stream
from fl.types import ThreatModel

SHAPE = (1, 6, 6)


class Inside(nn.Module):
    """Changes its input in place before a linear layer."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.head = change, nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return self.head(x.flatten(1))


def clamped(x: Tensor) -> Tensor:
    return x.clamp_(0.2, 0.8)


def normalised(x: Tensor) -> Tensor:
    return x.sub_(0.5).div_(0.25)


def image() -> Tensor:
    return torch.rand(1, *SHAPE, generator=stream(0, "image"))


LABEL = torch.tensor([2])


def expected(change: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model.head(change(image()).flatten(1)), LABEL)  # type: ignore[operator]
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("change", [clamped, normalised])
def test_a_forward_that_works_in_place_changes_no_image(change: Callable[[Tensor], Tensor]) -> None:
    inputs, model = image(), Inside(change)
    view, truth = from_batch(model, inputs, LABEL, threat=ThreatModel(knows_labels=True))
    assert torch.equal(inputs, image())
    assert torch.equal(truth.inputs, image())
    gradient = expected(change, model)
    captured = from_update(model, gradient, input_shape=SHAPE, num_classes=3, labels=LABEL, kind="gradient")
    for seen in (view, captured):
        again = predict(seen, truth.candidate())
        for name, value in gradient.items():
            torch.testing.assert_close(seen.update[name], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-6)
        assert isinstance(attacks.build({"name": "ig", "iterations": 2})(seen), Reconstruction)
    assert torch.equal(truth.inputs, image())


def test_an_image_behind_a_normalisation_in_place_comes_back() -> None:
    view, truth = from_batch(Inside(normalised), image(), LABEL, mean=[0.5], std=[0.25])
    result = attacks.build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
def test_exact_attacks_say_that_something_happens_beside_the_modules(attack: str) -> None:
    view, _ = from_batch(Inside(clamped), image(), LABEL)
    result = attacks.build(attack)(view)
    assert isinstance(result, NotApplicable)
    assert "no plain chain of modules" in result.reason
