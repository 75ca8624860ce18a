"""Numbers on an even grid are told from others, and what attacks make of an update of such numbers is not ruled out."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn

import attacks
from attacks.update.even_grids import bits_of_grid, grid_step
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream


def numbers(count: int = 300) -> Tensor:
    return torch.randn(count, generator=stream(0, "grid"))


def rounded(values: Tensor, bits: int, *, random: bool = False) -> Tensor:
    step = values.abs().max() / (2 ** (bits - 1) - 1)
    up = torch.rand(values.shape, generator=stream(1, "grid")) if random else 0.5
    return (values / step + up).floor() * step


@pytest.mark.parametrize("bits", [6, 8, 12])
@pytest.mark.parametrize("random", [False, True])
def test_a_grid_is_found_with_its_step(bits: int, random: bool) -> None:
    values = numbers()
    sent = rounded(values, bits, random=random)
    assert grid_step(sent) == pytest.approx(float(values.abs().max()) / (2 ** (bits - 1) - 1), rel=1e-4)
    assert grid_step(sent + 0.123) == pytest.approx(grid_step(sent), rel=1e-3)  # between extremes, as quantize has it
    assert bits_of_grid(sent) in {bits - 1, bits}


def test_other_numbers_lie_on_none() -> None:
    values = numbers(5000)
    signs = values.sign()
    kept = values * (values.abs() > 1)
    for other in (
        values,
        kept,
        signs,
        values.half().float(),
        values.bfloat16().float(),
        rounded(values, 4),
        numbers(20),
    ):
        assert grid_step(other) == 0
    start = torch.ones(200)
    change = start - (start - 1e-5 * numbers(200))
    assert grid_step(change) > 0
    assert bits_of_grid(change, start) == 0  # the weights' own last places


def test_a_miss_on_few_bits_is_not_ruled_out() -> None:
    model = initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).float()
    image = torch.rand(1, 1, 8, 8, generator=stream(0, "picture"))
    loss = nn.functional.cross_entropy(model(image), torch.tensor([3]))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    update = {n: rounded(0.1 * g, 8) for (n, _), g in zip(model.named_parameters(), grads, strict=True)}
    how = FedAvg(lr=0.1, steps=1, batch_size=None)
    result = attacks.build("analytic")(from_update(model, update, input_shape=(1, 8, 8), method=how))
    assert isinstance(result, attacks.base.Reconstruction)
    assert result.verified is None
    assert "no more than the rounding of what was sent in 8 bits a number" in result.note


@pytest.mark.parametrize("outputs", [1, 2])
def test_pixels_times_one_number_are_no_few_bits(outputs: int) -> None:
    pixels = (255 * torch.rand(64, generator=stream(0, "pixels"))).round() / 255
    change = torch.tensor([0.037, -0.037])[:outputs, None] * pixels
    assert grid_step(change) == 0
    assert grid_step(change.flatten()) > 0
    several = torch.outer(torch.randn(20, generator=stream(2, "pixels")), pixels)
    assert grid_step(rounded(several, 8)) > 0
