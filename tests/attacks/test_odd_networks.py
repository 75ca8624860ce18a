"""Networks that exact attacks can't follow: a reason that names what is in the way, not an error from inside torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import NotApplicable, build
from fl.capture import from_batch, from_update
from fl.seeds import stream
from fl.types import ServerView


class Recurrent(nn.Module):
    """Reads an image row by row; its LSTM returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x[:, 0])[0][:, -1])


class Named(nn.Module):
    """Hands its layer the input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=x.flatten(1))


class Fixed(nn.Module):
    """Takes batches of one size only."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.head = count, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.view(self.count, 64))


def seen(model: nn.Module) -> ServerView:
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "image"))
    return from_batch(model, image, torch.tensor([1]))[0]


def reason(attack: str, view: ServerView) -> str:
    result = build(attack)(view)
    assert isinstance(result, NotApplicable)
    return result.reason


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
@pytest.mark.parametrize(("model", "name"), [(Recurrent, "rows (LSTM)"), (Named, "head (Linear)")])
def test_a_module_that_is_no_map_of_one_tensor_is_named(attack: str, model: type[nn.Module], name: str) -> None:
    assert f"{name} takes or returns something else than one tensor" in reason(attack, seen(model()))


@pytest.mark.parametrize("attack", ["analytic", "spear"])
def test_a_network_for_batches_of_one_size_is_refused(attack: str) -> None:
    assert "does not run on a batch of 8 images" in reason(attack, seen(Fixed(1)))


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
def test_a_network_that_takes_no_single_image_is_refused(attack: str) -> None:
    model = Fixed(2)
    update = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    view = from_update(model, update, input_shape=(1, 8, 8), num_classes=3, batch_size=2, kind="gradient")
    said = reason(attack, view)
    if attack != "rgap":  # it takes one image alone
        assert "does not run on one image by itself" in said
