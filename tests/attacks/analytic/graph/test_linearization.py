"""Products with a Jacobian recorded once."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from attacks.analytic.graph.feature_inversion import invert_features
from attacks.analytic.graph.feature_residuals import FeatureTarget
from attacks.analytic.graph.linearization import (
    Forward,
    Linearization,
    RecordedDerivative,
    RecordedFunction,
    UnrecordableError,
    of_any_count,
)


def network(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small network with all that the record has to get right."""
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, stride=2, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
    )
    for parameter in layers.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5
    return layers.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("recorded", [True, False])
def test_products_are_those_of_the_jacobian(recorded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = network(generator)

    def forward(images: Tensor) -> list[Tensor]:
        hidden = layers[:4](images)
        return [hidden, layers[4:](hidden)]

    images = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    elsewhere = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    record = RecordedDerivative(forward, elsewhere) if recorded else None
    linear = Linearization(forward, images, record)
    direction = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    expected = torch.func.jvp(lambda z: tuple(forward(z)), (images,), (direction,))
    for value, of in zip(linear.values, expected[0], strict=True):
        torch.testing.assert_close(value, of)
    pushed = linear.push(direction)
    for product, of in zip(pushed, expected[1], strict=True):
        torch.testing.assert_close(product, of)
    weights = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in pushed]
    pulled = linear.pull(weights)
    inner = sum(float((w * p).sum()) for w, p in zip(weights, pushed, strict=True))
    assert float((pulled * direction).sum()) == pytest.approx(inner, rel=1e-10)


def test_a_product_with_the_record_has_no_convolution_with_zeros() -> None:
    """Derivatives with respect to weights are zero; computing them would double the cost."""
    layers = network(torch.Generator().manual_seed(0))
    record = RecordedDerivative(lambda z: [layers(z)], torch.randn(1, 3, 8, 8, dtype=torch.float64))
    convolution = torch.ops.aten.convolution.default
    assert sum(n.target is convolution for n in record.direction_part.graph.nodes) == 2
    assert sum(n.target is convolution for n in record.point_part.graph.nodes) <= 3


def test_an_output_that_does_not_depend_on_the_images_has_derivative_zero() -> None:
    images = torch.randn(2, 3, dtype=torch.float64)
    linear = Linearization(lambda z: [z * 2, torch.ones_like(z)], images)
    first, second = linear.push(images)
    torch.testing.assert_close(first, 2 * images)
    assert not bool(second.any())


def test_a_function_that_hangs_on_numbers_cannot_be_recorded() -> None:
    with pytest.raises(UnrecordableError):
        RecordedDerivative(lambda z: [z if float(z.sum()) > 0 else 2 * z], torch.ones(1, 3))


def test_a_record_whose_products_belong_to_two_matrices_is_none() -> None:
    """Recorded operations know nothing of what was detached while they were recorded."""
    with pytest.raises(UnrecordableError, match="one matrix"):
        RecordedDerivative(lambda z: [z * z.detach()], torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))


def test_the_record_gives_the_values_of_the_evaluation_that_products_belong_to() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = network(generator)
    evaluations: list[Tensor] = []

    def forward(images: Tensor) -> list[Tensor]:
        evaluations.append(images)
        return [layers(images)]

    images = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    record = RecordedDerivative(forward, images)
    evaluations.clear()
    linear = Linearization(forward, images, record)
    torch.testing.assert_close(linear.values[0], layers(images))
    assert not evaluations


def test_a_fault_of_the_record_is_not_taken_for_a_function_that_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr("attacks.analytic.graph.linearization._split", fail)
    with pytest.raises(TypeError, match="a fault"):
        invert_features(lambda z: [2 * z], [FeatureTarget(torch.ones(1, 1, 2, 2))], (1, 1, 2, 2))


def test_records_last_from_one_search_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = network(torch.Generator().manual_seed(0))
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made: list[torch.Size] = []

    class Counted(RecordedDerivative):
        def __init__(self, forward: Forward, images: Tensor) -> None:
            made.append(images.shape)
            super().__init__(forward, images)

    monkeypatch.setattr("attacks.analytic.graph.linearization.RecordedDerivative", Counted)
    features = RecordedFunction(lambda z: [layers[:2](z)])
    for _ in range(2):
        start = images + 0.01
        found = invert_features(features, [FeatureTarget(layers[:2](images))], images.shape, start=start)
        assert bool(found.converged.all())
    assert len(set(made)) == len(made) > 0
    made.clear()
    RecordedFunction.of(features).record(images)
    assert not made


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_function_recorded_for_some_images_takes_any_number_of_them(count: int, alone: bool) -> None:
    """Group normalization has the number of images written into it, as `view` has."""
    norm = nn.GroupNorm(2, 4).double()
    images = torch.rand(7, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    asked: list[int] = []

    def of_so_many(given: Tensor, number: int) -> list[Tensor]:
        asked.append(number)
        normalized = torch.ops.aten.native_group_norm(given, norm.weight, norm.bias, number, 4, 9, 2, norm.eps)[0]
        return [normalized, normalized.view(number, 36)]

    single = partial(of_so_many, number=1) if alone else None
    forward = of_any_count(partial(of_so_many, number=3), images[:3], single)
    asked.clear()
    found = forward(images[:count].requires_grad_())
    assert asked == ([1] if alone and count == 1 else [3] * math.ceil(count / 3))
    torch.testing.assert_close(found[0], norm(images[:count]))
    torch.testing.assert_close(found[1], norm(images[:count]).flatten(1))
    for place, gradient in enumerate(torch.autograd.functional.jacobian(lambda z: forward(z)[0], images[:count])):
        assert not gradient[..., torch.arange(count) != place, :, :, :].any()


def test_a_function_that_takes_any_number_of_images_is_left_as_it_is() -> None:
    def double(images: Tensor) -> list[Tensor]:
        return [2 * images]

    assert of_any_count(double, torch.zeros(2, 1, 2, 2)) is double
