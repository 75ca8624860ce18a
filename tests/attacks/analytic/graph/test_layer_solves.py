"""A layer's gradient gives its input from what flows back, and what flows back from its input."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import KnownSignal, count_shortfall, fit_in_turn, solve_input, solve_signal
from attacks.analytic.graph.shift_structure import find_signal_columns
from fl.seeds import stream


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(sum(shape), "layer"), dtype=torch.float64)


def layer(
    size: int = 6, stride: int = 1, padding: int = 1, dilation: int = 1, channels: tuple[int, int] = (4, 24)
) -> tuple[LayerEquations, Tensor, Tensor]:
    """A convolution of two images with its gradient by autograd, its input, and what flows back."""
    weight, given = noise(channels[1], channels[0], 3, 3).requires_grad_(), noise(2, channels[0], size, size)
    out = functional.conv2d(given, weight, None, stride, padding, dilation)
    signal = noise(*out.shape)
    (gradient,) = torch.autograd.grad(out, weight, signal)
    pair = (stride, stride), (padding, padding), (dilation, dilation)
    return LayerEquations("weight", weight.detach(), gradient, *pair, 1, given.shape, out.shape), given, signal


SETTINGS = [{}, {"stride": 2}, {"padding": 0}, {"dilation": 2, "padding": 2}, {"stride": 2, "padding": 0, "size": 7}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_equations_are_those_of_autograd(settings: dict[str, int]) -> None:
    equations, given, signal = layer(**settings)
    channels = equations.as_channels(given)  # (K, n H W)
    made = torch.einsum("ctp,kp->ctk", equations.signal_matrix(signal), channels)
    assert torch.allclose(made, equations.right_side(), atol=1e-10)
    again = (equations.as_channels(signal) @ equations.patches(given)).view_as(equations.gradient)
    assert torch.allclose(again, equations.gradient, atol=1e-10)
    assert torch.equal(equations.as_images(channels, given.shape), given)


@pytest.mark.parametrize("settings", [{}, {"dilation": 2, "padding": 2}])
def test_the_input_follows_from_the_signal(settings: dict[str, int]) -> None:
    equations, given, signal = layer(**settings)
    solved = solve_input([KnownSignal(equations, signal)])
    assert solved is not None
    assert torch.allclose(solved.values, given, atol=1e-8)
    assert solved.misfit < 1e-10


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_wrong_bits_of_the_activation_are_turned(slope: float) -> None:
    equations, given, full = layer()
    bits = noise(*full.shape) > -0.3
    known = KnownSignal(equations, full, bits, slope)
    out = functional.conv2d(given, equations.weight.requires_grad_(), None, 1, 1)
    (gradient,) = torch.autograd.grad(out, equations.weight, known.masked())
    wrong = bits.clone()
    wrong[0, 3, 2, 2] ^= True
    wrong[1, 7, 1, 4] ^= True
    told = KnownSignal(replace(equations, gradient=gradient), full, wrong, slope)
    solved = solve_input([told])
    assert solved is not None
    assert torch.allclose(solved.values, given, atol=1e-8)
    assert told.bits is not None
    assert torch.equal(told.bits, bits)


def test_rounding_in_silent_channels_is_no_misfit() -> None:
    equations, given, full = layer()
    full[:, :8] = 0
    out = functional.conv2d(given, equations.weight.requires_grad_(), None, 1, 1)
    (gradient,) = torch.autograd.grad(out, equations.weight, full)
    rounded = gradient + 1e-5 * gradient.abs().max() * noise(*gradient.shape)
    solved = solve_input([KnownSignal(replace(equations, weight=equations.weight.detach(), gradient=rounded), full)])
    assert solved is not None
    assert torch.allclose(solved.values, given, atol=1e-2)
    assert solved.bad_channels == 0


def test_bits_that_are_beyond_doubt_are_left() -> None:
    equations, _, full = layer()
    bits = torch.ones_like(full, dtype=torch.bool)
    bits[0, 3, 2, 2] = False
    known = KnownSignal(equations, full, bits.clone(), doubtful=torch.zeros_like(bits))
    assert solve_input([known]) is not None
    assert known.bits is not None
    assert torch.equal(known.bits, bits)


def test_two_layers_share_their_equations() -> None:
    one, given, signal = layer(channels=(4, 6))
    other, same, back = layer(channels=(4, 12))
    assert torch.equal(given, same)
    both = [KnownSignal(one, signal), KnownSignal(other, back)]
    assert "54 equations of weight for 72 numbers" in count_shortfall(both[:1])
    assert not count_shortfall(both)
    solved = solve_input(both)
    assert solved is not None
    assert torch.allclose(solved.values, given, atol=1e-7)


def test_the_signal_follows_from_the_input() -> None:
    equations, given, signal = layer(channels=(12, 5))
    found = solve_signal(equations, given)
    assert found is not None
    assert torch.allclose(found[0], signal, atol=1e-8)
    assert solve_signal(layer()[0], layer()[1]) is None  # 36 equations for 72 numbers


def test_noise_is_not_carried_from_position_to_position() -> None:
    equations, _, signal = layer(size=4, channels=(16, 48))
    noisy = replace(equations, gradient=equations.gradient + 1e-3 * noise(*equations.gradient.shape))
    columns = find_signal_columns(noisy.gradient, (4, 4), 2).columns
    start = columns.permute(2, 0, 1).reshape(signal.shape)
    carried, fitted = off_but_for_mixing(start, signal), off_but_for_mixing(fit_in_turn(noisy, start), signal)
    assert fitted < 3e-4
    assert fitted < carried / 3


def test_a_signal_of_too_few_equations_stays() -> None:
    equations, _, signal = layer(size=6, channels=(4, 24))
    assert equations.signal_equations < equations.unknown_signals
    assert torch.equal(fit_in_turn(equations, signal), signal)


def off_but_for_mixing(found: Tensor, true: Tensor) -> float:
    """Return by how much signals (B, C, h, w) are off where their images are mixed back as well as can be."""
    one, other = found.flatten(1).mT, true.flatten(1).mT
    return float((one @ torch.linalg.lstsq(one, other).solution - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("channels", "inputs", "positions"), [(5, 4, 1), (5, 4, 2), (4, 6, 4), (3, 5, 6), (5, 3, 4), (2, 2, 3)]
)
def test_equations_of_a_pointwise_convolution_are_counted(channels: int, inputs: int, positions: int) -> None:
    """They are the rank of the derivative of the gradient, and of the bias's, by what goes in and what flows back."""
    given, signal = noise(positions, inputs), noise(positions, channels)
    shapes = torch.Size((1, inputs, positions, 1)), torch.Size((1, channels, positions, 1))
    zero = torch.zeros(channels, inputs, 1, 1, dtype=torch.float64)
    layer = LayerEquations("weight", zero, zero, (1, 1), (0, 0), (1, 1), 1, *shapes)

    def sent(x: Tensor, s: Tensor) -> Tensor:
        return torch.cat([(s.T @ x).flatten(), s.sum(0)])

    by = torch.autograd.functional.jacobian(sent, (given, signal))
    equations, numbers = layer.count_factors()
    assert layer.is_pointwise == (positions > 1)
    assert numbers == given.numel() + signal.numel()
    assert int(torch.linalg.matrix_rank(torch.cat([part.flatten(1) for part in by], 1))) == min(equations, numbers)
