"""ReLUs whose kink is rounded off."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.graph.linearization import Linearization, RecordedFunction
from attacks.analytic.graph.softened_rectifiers import rectifier_sizes, soften_rectifiers


def images() -> Tensor:
    return torch.rand((2, 1, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_softened_relu_is_relu_but_for_its_width_and_has_a_derivative_everywhere() -> None:
    value = torch.linspace(-1, 1, 2001, dtype=torch.float64).requires_grad_()
    (soft,) = soften_rectifiers(lambda v: (v.relu(),), [0.2])(value)
    (slope,) = torch.autograd.grad(soft.sum(), value)
    off = (soft - value.relu()).detach()
    assert torch.equal(off[value.abs() > 0.2], torch.zeros_like(off[value.abs() > 0.2]))
    assert abs(float(off.max()) - 0.05) < 1e-12
    assert float(off.min()) >= 0
    assert float(slope.diff().abs().max()) < 0.0026  # 0.001 / (2 t); a kink would jump by 1
    assert slope[[0, -1]].tolist() == [0, 1]


def test_every_way_to_write_relu_is_softened_in_the_order_of_calls() -> None:
    layer = nn.ReLU()

    def forward(value: Tensor) -> Sequence[Tensor]:
        one = functional.relu(value - 0.5) + torch.relu(2 * value - 1) + layer(3 * value - 1.5)
        two = (4 * value - 2).relu() + functional.relu(5 * value - 2.5, inplace=True)
        return (one + two + torch.ops.aten.relu.default(6 * value - 3),)

    sizes = rectifier_sizes(forward, images())
    least = float((images() - 0.5).square().mean().sqrt())
    assert torch.allclose(torch.tensor(sizes), least * torch.arange(1.0, 7.0))
    at_the_kink = torch.full((1, 1), 0.5, dtype=torch.float64)
    (soft,) = soften_rectifiers(forward, [0.4, 0.8, 1.2, 1.6, 2.0, 2.4])(at_the_kink)
    assert abs(float(soft) - (0.4 + 0.8 + 1.2 + 1.6 + 2.0 + 2.4) / 4) < 1e-12
    for widths in ([0.0] * 6, [0.0]):
        assert torch.equal(soften_rectifiers(forward, widths)(images())[0], forward(images())[0])


def test_products_with_the_jacobian_are_recorded_of_what_is_softened() -> None:
    function = RecordedFunction.of(soften_rectifiers(lambda v: (functional.relu(v - 0.5),), [0.3]))
    record = function.record(images())
    assert record is not None
    ones = torch.ones_like(images())
    (pushed,) = Linearization(function, images(), record).push(ones)
    expected = ((images() - 0.5 + 0.3) / 0.6).clamp(0, 1)
    assert torch.allclose(pushed, expected)
