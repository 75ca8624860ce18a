"""Networks that take contrast off about a gray of theirs: whole levels decide, where no other picture is at such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction, build
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.confirmation import confirm
from attacks.verification.contrasts import ask_contrast
from attacks.verification.update_comparison import UpdateComparison
from fl.capture import from_batch
from fl.methods.fedper import FedPer
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


@pytest.mark.parametrize(
    ("name", "bias", "verified"),
    [("black and white", False, None), ("black and white", True, True), ("levels", False, True)],
)
def test_behind_a_private_classifier_what_it_is_given_tells_whether_contrast_is_told(
    name: str, bias: bool, verified: bool | None
) -> None:
    gray = 0.2 if name == "levels" else 0.5
    method = FedPer(steps=1, batch_size=None)
    view, truth = from_batch(network(gray, bias=bias), PICTURES[name], torch.tensor([1]), method=method)
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=None, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is verified, held.note


def test_other_contrasts_are_asked_for_no_longer_than_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    view, truth = from_batch(network(0.5), PICTURES["black and white"], torch.tensor([1]))
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    monkeypatch.setattr("attacks.verification.contrasts.gray_picture", lambda view: torch.full((1, 1, 6, 6), 0.5))
    with limited_by(SearchControl(time_limit=0.0)), pytest.raises(StoppedError):
        ask_contrast(view, check, truth.inputs, truth.labels)


def test_a_picture_that_an_attack_found_at_another_contrast_is_not_verified() -> None:
    view, _ = from_batch(network(0.5), PICTURES["black and white"], torch.tensor([1]))
    result = build("cascade")(view, seed=0)
    assert isinstance(result, Reconstruction)
    assert not result.verified
    assert not result.approximate
