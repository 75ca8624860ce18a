"""Gradients of which entries were left out give what the whole ones give, or nothing."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.layer_solves import KnownSignal, fit_in_turn, solve_input, solve_signal
from attacks.analytic.graph.unsent_entries import (
    AndersonAcceleration,
    complete_low_rank,
    find_sent,
    masked_least_squares,
)
from fl.seeds import stream


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(sum(shape), "unsent"), dtype=torch.float64)


def mask(share: float, *shape: int) -> Tensor:
    return torch.rand(shape, generator=stream(sum(shape), "mask")) < share


def pruned_layer(share: float) -> tuple[LayerEquations, Tensor, Tensor]:
    """A convolution of one image of whose gradient by autograd a share is known, its input, and what flows back."""
    weight, given = noise(40, 12, 3, 3).requires_grad_(), noise(1, 12, 4, 4)
    out = functional.conv2d(given, weight, None, 1, 1)
    signal = noise(*out.shape)
    (gradient,) = torch.autograd.grad(out, weight, signal)
    sent = mask(share, *weight.shape)
    one = (1, 1)
    layer = LayerEquations("weight", weight.detach(), gradient * sent, one, one, one, 1, given.shape, out.shape, sent)
    return layer, given, signal


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("even", [True, False])
def test_every_column_is_solved_by_what_was_sent_of_it(share: float, even: bool) -> None:
    """Against each column's own least squares; uneven sizes of equations are those that iterations may not end on."""
    a, sent = noise(90, 12), mask(share, 90, 7)
    sent[:14] = True
    a = a if even else a * torch.logspace(0, 3, 90, dtype=torch.float64)[:, None]
    b = noise(90, 7) * sent
    found = masked_least_squares(a, b, sent)
    assert found is not None
    for k in range(7):
        own = sent[:, k]
        wanted = torch.linalg.lstsq(a[own], b[own, k : k + 1]).solution[:, 0]
        assert torch.allclose(found[:, k], wanted, rtol=1e-6, atol=1e-8 * float(wanted.abs().max()))


def test_a_column_that_its_equations_leave_open_is_not_solved() -> None:
    a, sent = noise(30, 12), mask(0.9, 30, 4)
    sent[:, 2] = torch.arange(30) < 11
    assert masked_least_squares(a, noise(30, 4) * sent, sent) is None
    sent[:, 2] = torch.arange(30) < 20
    a[:20, 3] = 0  # what the third column's equations do not hear
    assert masked_least_squares(a, noise(30, 4) * sent, sent) is None


def test_a_matrix_of_low_rank_is_completed() -> None:
    whole = noise(40, 3) @ noise(3, 90)
    whole[5], whole[:, 7] = 0, 0
    sent = mask(0.5, 40, 90)
    found = complete_low_rank(whole * sent, sent, 3)
    assert found is not None
    assert torch.allclose(found, whole, atol=1e-3)
    assert not bool(found[5].any() or found[:, 7].any())


@pytest.mark.parametrize(("share", "rank"), [(0.08, 3), (0.5, 40)])
def test_a_matrix_is_not_completed_by_too_few_entries(share: float, rank: int) -> None:
    sent = mask(share, 40, 90)
    assert complete_low_rank(noise(40, 3) @ noise(3, 90) * sent, sent, rank) is None


def test_zeros_of_silent_slices_count_as_sent_and_single_zeros_do_not() -> None:
    gradient, sent = noise(48, 16, 3, 3), mask(0.5, 48, 16, 3, 3)
    gradient[:, 4], gradient[:, 2, 0, 1] = 0, 0
    known = find_sent(gradient * sent, sent & (gradient != 0))
    assert bool(known[:, 4].all() and known[:, 2, 0, 1].all())
    others = torch.ones_like(sent)
    others[:, 4], others[:, 2, 0, 1] = False, False
    assert torch.equal(known & others, sent & others)


def test_a_slice_that_chance_may_have_left_out_does_not_count_as_sent() -> None:
    sent = mask(0.1, 4, 3, 3, 3)
    sent[2, 1] = False  # of nine entries, nine in ten of which were left out
    assert not bool(find_sent(noise(4, 3, 3, 3) * sent, sent)[2, 1].any())


def test_extrapolated_steps_come_to_the_fixed_point_of_a_linear_map() -> None:
    """In as many steps as it has dimensions and one more, as conjugate directions do."""
    turn = torch.diag(torch.linspace(0.5, 0.99, 5, dtype=torch.float64))
    wanted, at, steps = noise(5), torch.zeros(5, dtype=torch.float64), AndersonAcceleration(8)
    for _ in range(7):
        at = steps.extrapolate(at, wanted + turn @ (at - wanted))
    assert torch.allclose(at, wanted, atol=1e-6)


@pytest.mark.parametrize("share", [0.9, 0.4])
def test_inputs_and_signals_follow_from_what_was_sent(share: float) -> None:
    layer, given, signal = pruned_layer(share)
    solved, back = solve_input([KnownSignal(layer, signal)]), solve_signal(layer, given)
    assert solved is not None
    assert back is not None
    assert torch.allclose(solved.values, given, atol=1e-8)
    assert torch.allclose(back[0], signal, atol=1e-8)
    assert max(solved.misfit, back[1]) < 1e-9


def test_wrong_bits_are_turned_by_what_was_sent() -> None:
    layer, given, full = pruned_layer(0.6)
    bits = noise(*full.shape) > -0.3
    out = functional.conv2d(given, layer.weight.requires_grad_(), None, 1, 1)
    (gradient,) = torch.autograd.grad(out, layer.weight, full * bits)
    assert layer.sent is not None
    fields = layer.stride, layer.padding, layer.dilation, 1, layer.input_shape, layer.output_shape, layer.sent
    again = LayerEquations("weight", layer.weight.detach(), gradient * layer.sent, *fields)
    wrong = bits.clone()
    wrong[0, 3, 1, 2] ^= True
    wrong[0, 11, 0, 0] ^= True
    known = KnownSignal(again, full, wrong)
    solved = solve_input([known])
    assert solved is not None
    assert known.bits is not None
    assert torch.equal(known.bits, bits)
    assert torch.allclose(solved.values, given, atol=1e-8)


def test_a_signal_that_is_a_little_off_is_fitted_to_what_was_sent() -> None:
    layer, _, signal = pruned_layer(0.7)
    fitted = fit_in_turn(layer, signal + 0.05 * noise(*signal.shape))
    solved = solve_input([KnownSignal(layer, fitted)])
    assert solved is not None
    assert solved.misfit < 1e-6
