"""What flows back into a convolution follows from shifts of its gradient, up to one mixing."""

import pytest
import torch
from torch.nn import functional

from attacks.analytic.graph.shift_structure import columns_by_position, count_images, find_signal_columns
from fl.seeds import stream


def gradient_of(images: int, kernel: int = 3, channels: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a convolution over 3 x 4 positions, and what flows back (n, C, 3, 4)."""
    draw = stream(images, "shifts")
    given = torch.randn(images, 16, 3, 4, generator=draw, dtype=torch.float64)
    signal = torch.randn(images, channels, 3, 4, generator=draw, dtype=torch.float64)
    weight = torch.zeros(channels, 16, kernel, kernel, dtype=torch.float64, requires_grad=True)
    out = functional.conv2d(given, weight, padding=kernel // 2)
    return torch.autograd.grad(out, weight, signal)[0], signal


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("images", [1, 2, 3])
def test_one_mixing_of_the_images_is_left(images: int, kernel: int) -> None:
    gradient, signal = gradient_of(images, kernel)
    columns = find_signal_columns(gradient, (3, 4), images).columns
    true = signal.flatten(2).permute(1, 2, 0)  # (C, P, B)
    mixing = torch.linalg.lstsq(columns.flatten(0, 1), true.flatten(0, 1)).solution
    assert torch.allclose(columns @ mixing, true, atol=1e-7)


def test_distinct_images_are_counted() -> None:
    assert [count_images(gradient_of(images)[0], 12, 3) for images in (1, 2)] == [1, 2]


def test_shifts_carry_the_first_position_to_all_others() -> None:
    draw = stream(0, "positions")
    basis = torch.randn(24, 24, generator=draw, dtype=torch.float64)  # two images of 3 x 4 positions

    def shift(down: int, right: int) -> torch.Tensor:
        level = torch.diag(torch.ones(4 - abs(right)), right)
        upright = torch.diag(torch.ones(3 - abs(down)), down)
        return basis @ torch.kron(torch.eye(2), torch.kron(upright, level)).double() @ torch.linalg.inv(basis)

    shifts = (shift(0, -1), shift(0, 1)), (shift(-1, 0), shift(1, 0))
    columns = torch.stack(columns_by_position(*shifts, (3, 4), 2), 1)
    true = basis.unflatten(1, (2, 12)).transpose(1, 2)  # (n, P, B)
    mixing = torch.linalg.lstsq(columns.flatten(0, 1), true.flatten(0, 1)).solution
    assert torch.allclose(columns @ mixing, true, atol=1e-9)
