"""Networks that take brightness or contrast off: whole levels decide, where no other picture is at such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction, Remark, build
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.confirmation import confirm
from attacks.verification.contrasts import ask_contrast
from attacks.verification.update_comparison import UpdateComparison
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
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


def colored(name: str, *, eps: float = 1e-12, gray: float = 0.5, padding: int = 1, kept: bool = False) -> nn.Module:
    """A network of color pictures whose first layer is normalized: as a whole, or each channel of pictures by itself.

    Args:
        name: "whole" or "channels".
        eps: that is added to variances.
        gray: that is taken off pixels.
        padding: of the first layer.
        kept: whether that has a bias.
    """
    first = nn.Conv2d(3, 24, 3, padding=padding, bias=kept, groups=3 if name == "channels" else 1)
    norm, side = nn.GroupNorm(3 if name == "channels" else 1, 24, eps=eps), 4 + 2 * padding
    head = nn.Flatten(), nn.Linear(24 * side**2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 10)
    model = nn.Sequential(Centered(gray), first, norm, nn.LeakyReLU(0.2), *head)
    initialize(model, stream(1, "contrasts"))
    if kept:
        nn.init.normal_(first.bias, generator=stream(2, "contrasts"))  # type: ignore[arg-type]
    return model


def color_pictures(count: int = 1) -> Tensor:
    return 0.3 + 0.4 * torch.rand(count, 3, 6, 6, generator=stream(3, "contrasts"))


def claimed(
    model: nn.Module, other: Tensor, *, true: Tensor | None = None, sure: bool | None = True, private: bool = False
) -> Reconstruction:
    """What is said of others than the pictures that made an update, by an attack that claims them."""
    true = color_pictures() if true is None else true
    labels = torch.arange(len(true))
    method = {"method": FedPer(steps=1, batch_size=None)} if private else {}
    view, _ = from_batch(model, true, labels, **method)
    held = confirm(view, Reconstruction(inputs=other, labels=None if private else labels, verified=sure))
    assert isinstance(held, Reconstruction)
    return held


SHARES = torch.tensor([0.6, 1.0, 0.8]).view(1, 3, 1, 1)
"""What the contrast of each channel is multiplied by."""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("private", [False, True])
def test_a_picture_whose_channels_have_another_contrast_is_not_verified(count: int, private: bool) -> None:
    true = color_pictures(count)
    for other in (true, 0.5 + SHARES * (true - 0.5)):
        held = claimed(colored("channels"), other, true=true, private=private)
        assert (held.verified, held.approximate) == (None, False), held.note
        assert "contrast off their channels" in held.note
    assert claimed(colored("channels", kept=True), true, true=true, private=private).verified


@pytest.mark.parametrize(("step", "verified"), [(1, True), (2, None)])
def test_whole_levels_decide_channel_by_channel(step: int, verified: bool | None) -> None:
    """Of a channel at every second level, of which gray is one, another at whole levels has half of its contrast."""
    true = (255 * color_pictures()).round()
    true[:, 1] = 51 + step * ((true[:, 1] - 51) / step).round()
    assert claimed(colored("channels", gray=0.2), true / 255, true=true / 255).verified is verified


@pytest.mark.parametrize("sure", [True, None])
@pytest.mark.parametrize(
    ("name", "shares", "remark"),
    [("whole", torch.tensor(0.6), Remark.SCALE_TAKEN_OFF), ("channels", SHARES, Remark.SCALES_TAKEN_OFF)],
)
def test_contrast_that_a_small_number_in_a_normalization_tells_alone_is_not_told_nearly(
    name: str, shares: Tensor, remark: Remark, sure: bool | None
) -> None:
    """It shows in the last digits, and in fewer than those by which a picture counts as near."""
    model, true = colored(name, eps=1e-5), color_pictures()
    held = claimed(model, 0.5 + shares * (true - 0.5), sure=sure)
    assert held.verified is None
    assert held.approximate
    assert remark in held.remarks
    assert "known up to" in held.note
    assert claimed(model, true).verified
    assert not claimed(model, 0.5 + shares * (true - 0.5), private=True).verified
    assert claimed(model, true, private=True).verified


@pytest.mark.parametrize("private", [False, True])
def test_brightness_that_a_normalization_above_a_layer_takes_off_is_not_verified(private: bool) -> None:
    """What is added to all pixels adds one number to each of a convolution's channels that is not padded."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, bias=False),
        nn.InstanceNorm2d(24),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(384, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, 10),
    )
    initialize(model, stream(1, "contrasts"))
    true = (255 * color_pictures()).round() / 255
    for other in (true, true + 20 / 255):
        held = claimed(model, other, true=true, private=private)
        assert (held.verified, held.approximate) == (None, False)
        assert "takes brightness or contrast off their channels" in held.note


def test_a_batch_with_a_flat_picture_hides_no_other_contrast() -> None:
    true = color_pictures(2)
    true[1] = 0.4 + 1e-3 * true[1]
    held = claimed(colored("whole"), 0.5 + 0.6 * (true - 0.5), true=true)
    assert (held.verified, held.approximate) == (None, False), held.note


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_a_picture_whose_brightness_rounding_leaves_open_a_little_is_no_one_of_several(kind: torch.dtype) -> None:
    """The network takes none off; weights of few digits tell brightness to some levels."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 5))
    initialize(model, stream(0, "few digits"))
    true = torch.randint(256, (1, 1, 8, 8), generator=stream(1, "few digits")) / 255
    view, truth = from_batch(model, true, torch.tensor([2]), method=FedAvg(lr=0.1, steps=1, batch_size=None))
    update = {name: value.to(kind) for name, value in view.update.items()}
    view = from_update(model.to(kind), update, input_shape=(1, 8, 8), num_classes=5, method=view.method)
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert (held.verified, held.approximate) == ((True, False) if kind == torch.float32 else (None, True)), held.note
    assert Remark.ONE_OF_SEVERAL not in held.remarks
    assert ("a little brighter or darker" in held.note) is (kind == torch.float16)
    assert "takes brightness" not in held.note
