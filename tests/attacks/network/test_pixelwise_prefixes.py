"""Functions of single pixels, such as a logarithm, are undone of one picture, and else named in refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.chains import initialized
from torch import nn

import attacks.prefix_inversion
from attacks import NotApplicable, Reconstruction
from attacks.analytic.rconv import RConv
from attacks.base import build
from attacks.network.pixel_prefix import read_pixel_prefix
from attacks.prefix_inversion import confirm_whole
from attacks.update.float_rounding import largest_rounding
from attacks.verification import value_errors
from fl.capture import ClientSettings, from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense


class Bent(nn.Module):
    """A convolution of what a function makes of pictures of 8 by 8."""

    def __init__(self, bend) -> None:
        super().__init__()
        self.bend, self.convolution, self.head = bend, nn.Conv2d(3, 24, 3, padding=1), nn.Linear(24 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.leaky_relu(self.convolution(self.bend(x))).flatten(1))


class Bending(nn.Module):
    """A function of pictures."""

    def __init__(self, bend) -> None:
        super().__init__()
        self.bend = bend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bend(x)


def reason(bend) -> str:
    pictures = torch.rand(2, 3, 8, 8, generator=stream(0, "picture"))  # of one, it would be undone
    result = RConv()(from_batch(initialized(Bent(bend)).float(), pictures, torch.tensor([1, 2]))[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    return result.reason


@pytest.mark.parametrize("bend", [torch.log1p, lambda x: (x + 0.01).sqrt(), lambda x: (x + 0.01).log()])
def test_a_function_of_pixels_alone_is_not_called_no_function_of_single_numbers(bend) -> None:
    assert "treats numbers one by one, but is no activation: of some numbers it makes none" in reason(bend)


def test_what_mixes_pixels_is_not_called_so() -> None:
    assert "makes none" not in reason(lambda x: (x + 0.01).log() - x.mean().log())
    assert "makes none" not in reason(lambda x: (x - 0.5).abs())


BENDS = {
    "log1p": torch.log1p,
    "square root": torch.sqrt,
    "gamma": lambda x: x**2.2,
    "reciprocal": lambda x: 1 / (x + 0.5),
    "two of them": lambda x: (2 * x.square() - 1).tanh(),
    "srgb": lambda x: torch.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4),
}


@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS.keys())
def test_what_bends_pixels_one_by_one_is_undone(bend) -> None:
    picture = (torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 250 + 3).round() / 255
    result = RConv()(from_batch(initialized(Bent(bend)).float(), picture, torch.tensor([1]))[0])
    assert isinstance(result, Reconstruction)
    assert result.verified
    torch.testing.assert_close(result.inputs, picture, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bend", [lambda x: x**2.2, lambda x: x.sqrt() * x, lambda x: -((1 - x) ** 1.5)])
@pytest.mark.parametrize("attack", ["analytic", "rconv"])
def test_where_no_other_pixels_have_a_number_the_picture_is_not_contradicted(bend, attack: str) -> None:
    """A power of a negative number is none: nobody may ask what a client makes of pixels below black or above white."""
    picture = (torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 200 + 25).round() / 255
    picture[..., 0, 0], picture[..., 0, 1] = 0, 1
    model = nn.Sequential(Bending(bend), nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
    view, _ = from_batch(initialized(Bent(bend) if attack == "rconv" else model).float(), picture, torch.tensor([1]))
    result = build(attack)(view)
    assert isinstance(result, Reconstruction)
    assert result.approximate or result.verified
    assert "not confirmed" not in result.note
    torch.testing.assert_close(result.inputs, picture, atol=0.02, rtol=0)


def test_what_folds_pixels_is_not() -> None:
    picture = torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))
    view, _ = from_batch(initialized(Bent(lambda x: (3 * x).sin())).float(), picture, torch.tensor([1]))
    assert read_pixel_prefix(view) is None
    assert isinstance(RConv()(view), NotApplicable)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.1, 1e-3])
def test_no_pixel_is_verified_that_the_updates_rounding_moves(kind, lr) -> None:
    picture = (torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 250 + 3).round() / 255
    model = initialized(Bent(torch.square)).float()
    grads = torch.autograd.grad(
        nn.functional.cross_entropy(model(picture), torch.ones(1).long()), [*model.parameters()]
    )
    moved = zip(model.named_parameters(), grads, strict=True)
    update = {name: (start - (start - lr * change)).to(kind).float().detach() for (name, start), change in moved}
    view = from_update(model, update, input_shape=(3, 8, 8), method=FedAvg(lr=lr, steps=1, batch_size=None))
    share = largest_rounding(view)
    assert share > {torch.float32: 1e-7, torch.float16: 1e-4, torch.bfloat16: 1e-3}[kind]
    prefix = read_pixel_prefix(view)
    assert prefix is not None
    values = prefix.values(picture)
    off = (values + 2 * share).clamp(0, 1)  # as far off as solving by such an update leaves it
    held = prefix.bound(off, Reconstruction(prefix.pictures(off), None, 0.0, (0.0,), verified=True), share)
    worst = float((prefix.pictures(off) - picture).abs().max() * 255)
    assert held.verified == (worst < 0.5 and kind is torch.float32 and lr == 0.1)
    assert largest_rounding(replace(view, sent_as="int8")) == 1


@pytest.mark.parametrize(("attack", "lr"), [("analytic", 1e-3), ("rconv", 1.4e-2)])
def test_pixels_at_whole_levels_tell_that_the_updates_rounding_moves_none(attack: str, lr: float) -> None:
    """The worst tensor's rounding would move dark pixels by levels, and it is not the one that they are read off."""
    picture = (torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 250 + 3).round() / 255
    flat = nn.Sequential(Bending(lambda x: x**2.2), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    model = initialized(Bent(lambda x: x**2.2) if attack == "rconv" else flat).float()
    method = FedAvg(lr=lr, steps=1, batch_size=None)
    view, _ = from_batch(model, picture, torch.tensor([1]), options=ClientSettings(method=method))
    result = build(attack)(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert "may be off" not in result.note
    torch.testing.assert_close(result.inputs, picture, atol=0.25 / 255, rtol=0)
    prefix = read_pixel_prefix(view)
    assert prefix is not None
    between = prefix.values(picture + 0.3 / 255)  # which tell nothing of how far off they are
    held = replace(result, inputs=prefix.pictures(between))
    assert not prefix.bound(between, held, largest_rounding(view)).verified


def flat(bend) -> nn.Module:
    """A perceptron of what a function makes of pictures of 8 by 8."""
    layers = nn.Sequential(Bending(bend), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    return initialized(layers).float()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_least_squares_tell_that_rounding_moves_no_pixel_between_levels(kind) -> None:
    """The worst tensor is rounded by so much that dark pixels would be off by levels, and it tells none of them."""
    picture = torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 0.98 + 0.01
    lr = 1e-3 if kind is torch.float32 else 0.1
    model = flat(lambda x: x**2.2)
    loss = nn.functional.cross_entropy(model(picture), torch.ones(1).long())
    moved = zip(model.named_parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True)
    update = {name: (start - (start - lr * change)).detach() for (name, start), change in moved}
    if kind is torch.float16:
        update = {name: change.half().float() for name, change in update.items()}
    view = from_update(model, update, input_shape=(3, 8, 8), method=FedAvg(lr=lr, steps=1, batch_size=None))
    attack, prefix = build("analytic"), read_pixel_prefix(view)
    assert prefix is not None
    found = attack(view)
    assert isinstance(found, Reconstruction)
    assert found.verified or (found.approximate and kind is torch.float16)
    assert "may be off" not in found.note
    torch.testing.assert_close(found.inputs, picture, atol=0.25 / 255, rtol=0)

    above = prefix.above(view)
    assert above is not None
    dark, noise = torch.zeros_like(picture), torch.randn(picture.shape, generator=stream(0, "noise"))
    dark.view(-1)[picture.argmin()] = 1
    for off in (0.002 * noise, 0.002 * dark, 0.01 * picture):
        values = prefix.values((picture + off).clamp(0, 1))
        given = Reconstruction(values, torch.ones(1).long(), 0.0, (0.0,), verified=True)
        assert not confirm_whole(attack, view, above, given).verified


@pytest.mark.parametrize(
    ("bend", "lr"),
    [
        (lambda x: x**2.2, 1e-3),
        (lambda x: nn.functional.leaky_relu(x - 0.5, 1e-3), 0.1),
        (lambda x: torch.maximum(x, 1e-4 * x + 0.3), 0.1),
        (lambda x: x.clamp(0.3) + 1e-4 * x, 1e-3),
    ],
    ids=["gamma", "leaky", "maximum", "clamp"],
)
@pytest.mark.parametrize("side", [8, 20])
def test_a_picture_put_at_whole_levels_is_not_verified_where_rounding_hides_a_wrong_pixel(bend, lr, side) -> None:
    """How far pixels are from levels tells how well they were solved for, of those alone that were solved for."""
    picture = (torch.rand(1, 3, side, side, generator=stream(0, "picture")) * 250 + 3).round() / 255
    layers = nn.Sequential(Bending(bend), nn.Flatten(), nn.Linear(picture.numel(), 64), nn.ReLU(), nn.Linear(64, 10))
    method = FedAvg(lr=lr, steps=1, batch_size=None)
    options = ClientSettings(method=method)
    view, _ = from_batch(initialized(layers).float(), picture, torch.tensor([1]), options=options)
    prefix = read_pixel_prefix(view)
    assert prefix is not None
    above = prefix.above(view)
    wrong = picture.clone()
    wrong.view(-1)[picture.argmin()] += 1 / 255
    given = Reconstruction(prefix.values(wrong), torch.ones(1).long(), 0.0, (0.0,), verified=True)
    assert not confirm_whole(build("analytic"), view, above, given).verified


@pytest.mark.parametrize("name", ["analytic", "cascade"])
def test_least_squares_of_an_update_are_solved_once_for_each_attack(monkeypatch, name: str) -> None:
    picture, asked = torch.rand(1, 3, 8, 8, generator=stream(0, "picture")), []
    own = attacks.prefix_inversion.value_errors
    monkeypatch.setattr(attacks.prefix_inversion, "value_errors", lambda *given: asked.append(own(*given)) or asked[-1])
    view, _ = from_batch(flat(lambda x: x**2.2), picture, torch.tensor([1]))
    found = build(name)(view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert len(asked) == 1


@pytest.mark.parametrize("bend", [lambda x: x, lambda x: x**2.2], ids=["affine", "gamma"])
@pytest.mark.parametrize("weak", [1e-4, 1e-5])
def test_a_pixel_that_is_darkened_before_all_layers_is_not_verified(bend, weak: float) -> None:
    """The other pixels' distances from levels tell nothing of one that the network is given a ten-thousandth of."""
    picture = (torch.rand(1, 3, 8, 8, generator=stream(1, "picture")) * 255).round() / 255
    picture.view(-1)[63] = 252 / 255
    dimmed = torch.ones(1, 3, 8, 8)
    dimmed.view(-1)[63] = weak
    method = FedAvg(lr=1e-2, steps=1, batch_size=None)
    model = flat(lambda x: bend(x) * dimmed.to(x))
    view, _ = from_batch(model, picture, torch.tensor([1]), options=ClientSettings(method=method))
    found = build("analytic")(view)
    assert isinstance(found, Reconstruction)
    assert not found.verified
    assert "may be off" in found.note


@pytest.mark.parametrize("tells", [True, False])
def test_pictures_found_on_the_whole_network_are_held_to_their_bend(*, tells: bool) -> None:
    """Levels tell nothing of pixels that were not solved for: what is handed in lies there, right or wrong."""
    picture = (torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) * 200 + 40).round() / 255
    picture.view(-1)[100] = (40 if tells else 2) / 255
    wrong, model = picture.clone(), flat(lambda x: x**2.2)
    wrong.view(-1)[100] += (0 if tells else 1) / 255
    method = FedAvg(lr=1e-2 if tells else 1e-3, steps=1, batch_size=None)
    view, _ = from_batch(model, picture, torch.tensor([1]), options=ClientSettings(method=method))
    given = Reconstruction(wrong, torch.tensor([1]), 0.0, (0.0,), verified=True)
    assert bool(confirm_whole(build("backsolve"), view, None, given).verified) == tells


def smooth_picture(seed: int) -> torch.Tensor:
    """A picture of 8 by 8 pixels at whole levels."""
    coarse = torch.rand(1, 3, 2, 2, generator=stream(seed, "picture"))
    return (255 * nn.functional.interpolate(coarse, size=8, mode="bicubic").clamp(0, 1)).round() / 255


@pytest.mark.parametrize(
    ("bend", "attack", "lr"),
    [
        (lambda x: torch.sigmoid(50 * (x - 0.5)), "rconv", 1e-3),
        (lambda x: x**8, "rconv", 1e-3),
        (lambda x: (x - x.mean((1, 2, 3), keepdim=True)) ** 3, "backsolve", 1.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_pixels_that_a_flat_function_hardly_tells_are_not_borne_out(bend, attack: str, lr: float, seed: int) -> None:
    picture, model = smooth_picture(seed), initialized(Bent(bend)).float()
    method = FedAvg(lr=lr, steps=1, batch_size=None)
    view, _ = from_batch(model, picture, torch.tensor([1]), options=ClientSettings(method=method))
    found = build(attack)(view)
    if isinstance(found, Reconstruction):
        assert not found.verified
        assert not found.approximate


def test_an_even_grid_counts_as_rounding() -> None:
    view, _ = from_batch(
        initialized(Bent(torch.square)).float(),
        torch.rand(1, 3, 8, 8, generator=stream(0, "picture")),
        torch.tensor([1]),
    )
    step = {name: value.abs().max() / 127 for name, value in view.update.items()}
    coarse = {name: (value / step[name]).round() * step[name] for name, value in view.update.items()}
    assert largest_rounding(replace(view, update=coarse)) > 100 * largest_rounding(view)


def test_least_squares_are_not_worked_out_where_derivatives_would_take_minutes(monkeypatch) -> None:
    picture = torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))
    view, _ = from_batch(flat(lambda x: x**2.2), picture, torch.tensor([1]))
    found = Reconstruction(picture, torch.tensor([1]), 0.0, (0.0,), verified=True)
    assert value_errors.value_errors(view, found) is not None
    count = picture.numel() * sum(dense(value).numel() for value in view.update.values())
    monkeypatch.setattr(value_errors, "MAX_PRODUCT", count - 1)
    assert value_errors.value_errors(view, found) is None
