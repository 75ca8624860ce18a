"""Of pictures that a network takes for one, none is said to be the right one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction
from attacks.network.pixel_map import PixelMap, read_pixel_map
from attacks.verification import FEWER_GIVEN, FOLDED, UNSEEN, confirm
from fl.capture import from_batch
from fl.seeds import stream
from fl.view import ServerView

SHAPE = (3, 8, 8)
Before = Callable[[Tensor], Tensor]


class Preceded(nn.Module):
    """Convolutions behind something that is done to pixels."""

    def __init__(self, before: Before, stem: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before
        with torch.random.fork_rng():
            torch.random.default_generator.manual_seed(0)
            self.stem = stem or nn.LazyConv2d(12, 3)
            self.body = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
            self.body(self.stem(before(torch.zeros(1, *SHAPE))))

    def forward(self, x: Tensor) -> Tensor:
        returned: Tensor = self.body(self.stem(self.before(x)))
        return returned


class TwoTowers(nn.Module):
    """Networks of the left and of the right half."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Linear(2 * 8 * 6 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.left(x[..., :4]).relu(), self.right(x[..., 4:]).relu()
        returned: Tensor = self.head(torch.cat([half.flatten(1) for half in halves], 1))
        return returned


def picture() -> Tensor:
    return torch.randint(256, (1, *SHAPE), generator=stream(0, "picture")) / 255


def view_of(model: nn.Module) -> ServerView:
    return from_batch(model.eval(), picture(), torch.tensor([3]))[0]


def claimed(view: ServerView, other: Tensor) -> Reconstruction:
    """What is said of a picture by an attack that is sure of it."""
    found = confirm(view, Reconstruction(inputs=other, labels=torch.tensor([3]), verified=True))
    assert isinstance(found, Reconstruction)
    return found


TOLD: dict[str, Before] = {
    "as they are": lambda x: x,
    "normalized": lambda x: (x - 0.4) / 0.2,
    "clamped to their range": lambda x: x.clamp(0, 1),
    "gamma": lambda x: x**2.2,
    "inverted root": lambda x: 1 - x.sqrt(),
    "turned, then cubed": lambda x: x**3 * 255,
    "blurred": lambda x: functional.avg_pool2d(x, 3, 1, 1),
}
FOLDING: dict[str, Before] = {
    "absolute": lambda x: (2 * x - 1).abs(),
    "square": lambda x: (2 * x - 1) ** 2,
    "parabola": lambda x: 4 * x * (1 - x),
    "cosine": lambda x: torch.cos(6.28 * x),
    "four bits": lambda x: (15 * x).round() / 15,
    "clamped": lambda x: x.clamp(0.1, 0.9),
    "rectified": lambda x: (x - 0.3).relu(),
    "maximum of neighbors": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "gray": lambda x: x.mean(1, keepdim=True),
    "cropped": lambda x: x[..., 1:7, :],
    "smaller": lambda x: functional.avg_pool2d(x, 2),
    "standardized": lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True),
}
FEWER = {"gray": 64, "smaller": 48, "cropped": 144}
"""Numbers that a network is given where these are affine functions of the pixels."""


@pytest.mark.parametrize("before", TOLD)
def test_pixels_are_told(before: str) -> None:
    view = view_of(Preceded(TOLD[before]))
    found = read_pixel_map(view)
    assert found is not None
    assert not found.folds
    assert claimed(view, picture()).verified


@pytest.mark.parametrize("before", FOLDING)
def test_pictures_fold(before: str) -> None:
    view = view_of(Preceded(FOLDING[before]))
    assert read_pixel_map(view) == PixelMap(True, FEWER.get(before, 0))
    found = claimed(view, picture())
    assert not found.verified
    assert found.approximate is (before == "cropped")
    expected = FEWER_GIVEN.format(count=192, seen=FEWER[before]) if before in FEWER else FOLDED
    assert found.note == expected


@pytest.mark.parametrize("before", ["absolute", "square", "parabola"])
def test_a_mirrored_pixel_is_not_verified(before: str) -> None:
    view = view_of(Preceded(FOLDING[before]))
    mirrored = torch.where(torch.rand(1, *SHAPE, generator=stream(1, "mirrored")) < 0.5, picture(), 1 - picture())
    found = claimed(view, mirrored)
    assert (found.verified, found.approximate, found.note) == (None, False, FOLDED)


def test_what_goes_into_two_networks_is_told_by_both() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = TwoTowers()
    assert read_pixel_map(view_of(model)) == PixelMap(False, 192)


@pytest.mark.parametrize(("shown", "stays"), [(6, True), (2, False)])
def test_pixels_that_a_network_does_not_see_are_counted(shown: int, stays: bool) -> None:
    seen = (torch.arange(8) < shown).float()
    view = view_of(Preceded(lambda x: x * seen))
    other = torch.where(seen > 0, picture(), 0.5)
    found = confirm(view, Reconstruction(inputs=other, labels=torch.tensor([3])))
    assert isinstance(found, Reconstruction)
    assert (found.verified, found.approximate) == (None, stays)
    assert found.note == UNSEEN.format(unseen=3 * 8 * (8 - shown), count=3 * 8 * 8)


def test_pixels_that_a_stride_passes_over_are_not_borne_out() -> None:
    view = view_of(Preceded(lambda x: x, nn.Conv2d(3, 12, 1, stride=2)))
    found = confirm(view, Reconstruction(inputs=picture(), labels=torch.tensor([3])))
    assert isinstance(found, Reconstruction)
    assert not found.approximate
    assert "144 of the 192" in found.note
