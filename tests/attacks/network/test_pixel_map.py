"""Of pictures that a network takes for one, none is said to be the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, Remark
from attacks.network.pixel_map import PixelMap, read_pixel_map
from attacks.verification.confirmation import confirm
from attacks.verification.words import CHANNELS_SHIFT_OPEN, FEWER_GIVEN, FOLDED, SHIFT_OPEN
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.tensors import dense
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


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Before) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


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
    "blurred": lambda x: functional.avg_pool2d(x, 3, 1, 1) + x,
    "mirrored, with gamma": lambda x: x.flip(-1) ** 2.2,
    "other channels first": lambda x: x[:, [2, 1, 0]].sqrt(),
    "larger": lambda x: functional.interpolate(x, scale_factor=2),
    "larger, smoothly": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "padded": lambda x: functional.pad(x, (1, 1, 1, 1)) ** 2,
    "with its square": lambda x: torch.cat([x, x**2], 1),
    "with what is folded": lambda x: torch.cat([x, (2 * x - 1).abs()], 1),
    "other colors": lambda x: torch.einsum(
        "ij,bjhw->bihw", torch.tensor([[0.6, 0.3, 0], [0.1, 0.7, 0.2], [0, 0, 1.0]]).to(x), x
    ),
    "at 8 bits": lambda x: (255 * x).round() / 255,
}
FOLDING: dict[str, Before] = {
    "absolute": lambda x: (2 * x - 1).abs(),
    "square": lambda x: (2 * x - 1) ** 2,
    "parabola": lambda x: 4 * x * (1 - x),
    "cosine": lambda x: torch.cos(6.28 * x),
    "four bits": lambda x: (15 * x).round() / 15,
    "clamped": lambda x: x.clamp(0.1, 0.9),
    "rectified": lambda x: (x - 0.3).relu(),
    "gray": lambda x: x.mean(1, keepdim=True),
    "gray three times": lambda x: x.mean(1, keepdim=True).repeat(1, 3, 1, 1),
    "smaller and larger": lambda x: functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2),
    "less its mean": lambda x: x - x.mean((1, 2, 3), keepdim=True),
    "cropped twice": lambda x: torch.cat([x[..., 1:7, :], x[..., 1:7, :]], 1),
    "cropped": lambda x: x[..., 1:7, :],
    "smaller": lambda x: functional.avg_pool2d(x, 2),
    "neighbors, folded": lambda x: (functional.avg_pool2d(2 * x - 1, 3, 1, 1) + 2 * x - 1).abs(),
    "channels by their norm": lambda x: x.norm(dim=1, keepdim=True),
    "softmax": lambda x: x.flatten(1).softmax(1).view_as(x),
    "softmax of channels": lambda x: x.softmax(1),
    "channels of length one": lambda x: functional.normalize(x, dim=1),
    "its first channel of length one": lambda x: torch.cat([functional.normalize(x[:, :1], dim=(2, 3)), x[:, 1:]], 1),
}
FEWER = {
    "gray three times": 64,
    "smaller and larger": 48,
    "less its mean": 191,
    "cropped twice": 144,
    "gray": 64,
    "smaller": 48,
    "cropped": 144,
}
"""Numbers that a network is given where these are affine functions of the pixels."""


@pytest.mark.parametrize("before", TOLD)
def test_invertible_preprocessing_leaves_pixels_determined(before: str) -> None:
    view = view_of(Preceded(TOLD[before]))
    assert read_pixel_map(view) == PixelMap("told", 192)
    assert claimed(view, picture()).verified


@pytest.mark.parametrize("before", FOLDING)
def test_preprocessing_that_merges_pictures_is_never_verified(before: str) -> None:
    view = view_of(Preceded(FOLDING[before]))
    assert read_pixel_map(view) == PixelMap("fewer", FEWER[before]) if before in FEWER else PixelMap("folded")
    found = claimed(view, picture())
    assert not found.verified
    assert found.approximate is (before in {"cropped", "cropped twice", "less its mean"})
    words = SHIFT_OPEN if before == "less its mean" else FEWER_GIVEN
    expected = words.format(count=192, seen=FEWER[before]) if before in FEWER else FOLDED
    assert found.note == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1, 3])
def test_of_a_fixed_convolution_and_a_relu_no_pixel_counts_as_folded(size: int, seed: int) -> None:
    """A number that a ReLU bends may look as if it hung on one pixel, of a few pictures."""
    draw = stream(seed, "fixed")
    weight, bias = (torch.randn(shape, generator=draw) for shape in ((12, 3, size, size), (12,)))

    def fixed(x: Tensor) -> Tensor:
        return functional.conv2d(x, weight.to(x), bias.to(x) * 0.3 - 0.3).relu()

    assert read_pixel_map(view_of(Preceded(fixed))).kind == "unknown"


def _less(part: tuple[int, ...]) -> Before:
    return lambda x: x - x.mean(part, keepdim=True)


@pytest.mark.parametrize("side", [8, 40])
@pytest.mark.parametrize(
    ("dims", "remark", "words"),
    [((1, 2, 3), Remark.SCALE_TAKEN_OFF, SHIFT_OPEN), ((2, 3), Remark.SCALES_TAKEN_OFF, CHANNELS_SHIFT_OPEN)],
)
def test_of_pictures_less_their_mean_nothing_but_their_brightness_is_open(
    dims: tuple[int, ...], remark: Remark, words: str, side: int
) -> None:
    """Also of large ones, of whose affine functions nobody works out the rank."""
    small = torch.randint(50, 200, (1, 3, side, side), generator=stream(0, "less their mean")) / 255
    model = nn.Sequential(Function(_less(dims)), nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.LazyLinear(10))
    model(small)
    initialize(model, stream(1, "less their mean"))
    view = from_batch(model, small, torch.tensor([3]))[0]
    read = read_pixel_map(view)
    assert read == PixelMap("fewer", 3 * side**2 - (1 if remark == Remark.SCALE_TAKEN_OFF else 3))
    for other in (small, small + 20 / 255):
        found = claimed(view, other)
        assert (found.verified, found.approximate) == (None, True), found.note
        assert words.format(count=3 * side**2, seen=read.numbers) in found.note
        assert remark in found.remarks


@pytest.mark.parametrize(
    "before",
    [
        _less((1,)),
        _less((3,)),
        lambda x: x - functional.avg_pool2d(x, 2).repeat_interleave(2, 2).repeat_interleave(2, 3),
    ],
    ids=["colors less gray", "less its rows' means", "less its blocks' means"],
)
def test_a_picture_of_which_sums_of_pixels_are_open_is_not_borne_out(before: Before) -> None:
    """Most of its numbers are told, but each pixel may be another by as much as there is room."""
    view = view_of(Preceded(before))
    read = read_pixel_map(view)
    assert (read.kind, read.shift, read.pixels) == ("fewer", "", None)
    assert read.numbers >= 96
    found = claimed(view, picture())
    assert (found.verified, found.approximate) == (None, False)
    assert found.note.endswith(FEWER_GIVEN.format(count=192, seen=read.numbers))


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
    assert read_pixel_map(view_of(model)) == PixelMap("told", 192)


UNKNOWN: dict[str, tuple[Before, str]] = {
    "maximum of neighbors": (lambda x: functional.max_pool2d(x, 3, 1, 1), "change nothing in the update"),
}


@pytest.mark.parametrize("before", UNKNOWN)
def test_of_what_nobody_knows_pictures_are_asked_that_networks_take_for_others(before: str) -> None:
    function, words = UNKNOWN[before]
    view = view_of(Preceded(function))
    assert read_pixel_map(view).kind == "unknown"
    found = claimed(view, picture())
    assert not found.verified
    assert words in found.note


def test_what_reads_each_pixel_among_others_stays_verified() -> None:
    view = view_of(Preceded(lambda x: x + 0.1 * (functional.avg_pool2d(x, 3, 1, 1)) ** 2))
    assert read_pixel_map(view).kind == "unknown"
    assert claimed(view, picture()).verified


def test_a_frozen_layer_is_what_a_network_does_to_pixels() -> None:
    frozen = nn.Conv2d(3, 1, 1).requires_grad_(False)
    model = Preceded(lambda x: x, nn.Sequential(frozen, nn.LazyConv2d(12, 3)))
    view = view_of(model)
    assert read_pixel_map(view) == PixelMap("fewer", 64)
    frozen.requires_grad_(True)
    named = dict(view_of(model).update)
    still = {name: 0 * dense(named[name]) for name in named if name.startswith("stem.0.")}
    unmoved = replace(view_of(model), update={**named, **still})  # it is sent, as it came
    assert still
    assert claimed(unmoved, picture()).note.endswith(FEWER_GIVEN.format(count=192, seen=64))


@pytest.mark.parametrize(("shown", "stays"), [(6, True), (2, False)])
def test_pixels_that_a_network_does_not_see_are_counted(shown: int, stays: bool) -> None:
    seen = (torch.arange(8) < shown).float()
    view = view_of(Preceded(lambda x: x * seen))
    other = torch.where(seen > 0, picture(), 0.5)
    found = confirm(view, Reconstruction(inputs=other, labels=torch.tensor([3])))
    assert isinstance(found, Reconstruction)
    assert (found.verified, found.approximate) == (None, stays)
    assert found.note == FEWER_GIVEN.format(seen=3 * 8 * shown, count=3 * 8 * 8)


def test_pixels_that_a_stride_passes_over_are_not_borne_out() -> None:
    view = view_of(Preceded(lambda x: x, nn.Conv2d(3, 12, 1, stride=2)))
    found = confirm(view, Reconstruction(inputs=picture(), labels=torch.tensor([3])))
    assert isinstance(found, Reconstruction)
    assert not found.approximate
    assert "144 of the 192" in found.note
