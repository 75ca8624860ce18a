"""Networks that take contrast off about a gray of theirs: whole levels decide, where no other picture is at such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction, build
from attacks.verification.confirmation import confirm
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream


class Centered(nn.Module):
    """Takes a gray off."""

    def __init__(self, gray: float) -> None:
        super().__init__()
        self.gray = gray

    def forward(self, x: Tensor) -> Tensor:
        return x - self.gray


def network(gray: float, *, bias: bool = False) -> nn.Module:
    first = nn.Conv2d(1, 8, 3, bias=bias), nn.GroupNorm(2, 8, eps=1e-12), nn.ReLU()
    model = nn.Sequential(Centered(gray), *first, nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 4))
    initialize(model, stream(1, "contrasts"))
    if bias:
        nn.init.normal_(model[1].bias, generator=stream(2, "contrasts"))  # type: ignore[arg-type]
    return model


def drawn() -> Tensor:
    return torch.rand(1, 1, 6, 6, generator=stream(0, "contrasts"))


PICTURES = {
    "levels": (60 + drawn() * 128).round() / 255,
    "levels, every second": (51 + 2 * (drawn() * 90).round()) / 255,
    "black and white": drawn().round(),
    "between levels": 0.2 + 0.6 * drawn(),
}


@pytest.mark.parametrize(
    ("name", "gray", "bias", "verified"),
    [
        ("levels", 0.2, False, True),
        ("levels, every second", 0.2, False, None),
        ("levels, every second", 0.2, True, True),
        ("black and white", 0.5, False, None),
        ("black and white", 0.5, True, True),
        ("between levels", 0.5, False, None),
    ],
)
def test_a_picture_is_verified_where_none_of_another_contrast_makes_the_update(
    name: str, gray: float, bias: bool, verified: bool | None
) -> None:
    view, truth = from_batch(network(gray, bias=bias), PICTURES[name], torch.tensor([1]))
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is verified, held.note
    assert ("contrast off" in held.note) is (verified is None)
    assert not held.approximate


def test_a_picture_that_an_attack_found_at_another_contrast_is_not_verified() -> None:
    view, _ = from_batch(network(0.5), PICTURES["black and white"], torch.tensor([1]))
    result = build("cascade")(view, seed=0)
    assert isinstance(result, Reconstruction)
    assert not result.verified
    assert not result.approximate
