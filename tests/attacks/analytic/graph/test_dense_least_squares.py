"""The last steps of a search with the whole Jacobian, and the errors left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.analytic.graph import dense_least_squares, undetermined_numbers
from attacks.analytic.graph.dense_least_squares import finish_densely, solve_densely
from attacks.analytic.graph.feature_inversion import InvertedImages
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget
from attacks.analytic.graph.undetermined_numbers import count_undetermined
from fl.seeds import stream

NOISE = 1e-6
SHAPE, EQUATIONS = (1, 3, 4, 4), 120


def linear(weakest: float, noise: float = NOISE) -> tuple[Tensor, FeatureTarget, Tensor]:
    """An image at whole levels, its features by a matrix of that condition with errors, and the matrix."""
    draw = stream(0, "linear features")
    image = torch.randint(256, SHAPE, generator=draw).double() / 255
    left, _ = torch.linalg.qr(torch.randn(EQUATIONS, 48, generator=draw, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(48, 48, generator=draw, dtype=torch.float64))
    matrix = left * torch.logspace(0, torch.tensor(weakest).log10().item(), 48, dtype=torch.float64) @ right
    exact = image.flatten(1) @ matrix.mT
    error = torch.randn(exact.shape, generator=draw, dtype=torch.float64)
    return image, FeatureTarget(exact + noise * exact.norm() / error.norm() * error, noise=noise), matrix


def by(matrix: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """The features of a matrix."""
    return lambda images: [images.flatten(1).to(matrix) @ matrix.mT]


def stopped_at(images: Tensor, residual: float) -> InvertedImages:
    """What a search hands out that ended there."""
    count = len(images)
    reached = torch.full((count,), residual, dtype=torch.float64)
    return InvertedImages(images, reached, reached <= 3 * NOISE, torch.ones(count), 1)


def test_steps_and_errors_are_those_of_least_squares() -> None:
    image, target, matrix = linear(1e-4)
    problem = FeatureProblem.of(by(matrix), None, [replace(target, noise=1e-9)])
    found = solve_densely(problem, image + 0.01)
    assert found is not None
    wanted = torch.linalg.lstsq(matrix, target.value.mT).solution.mT
    assert torch.allclose(found.images.flatten(1), wanted, atol=1e-9)
    variance = (target.value - wanted @ matrix.mT).square().sum() / (EQUATIONS - 48)
    errors = (variance * torch.linalg.inv(matrix.mT @ matrix).diagonal()).sqrt()
    assert torch.allclose(found.errors.flatten(), errors, rtol=1e-3)


def test_errors_are_not_less_than_by_the_stated_noise() -> None:
    image, target, matrix = linear(1e-2)
    errors = []
    for noise in (NOISE, 10 * NOISE):
        found = solve_densely(FeatureProblem.of(by(matrix), None, [replace(target, noise=noise)]), image)
        assert found is not None
        errors.append(found.errors)
    assert torch.allclose(errors[1], 10 * errors[0], rtol=0.3)


def test_products_in_single_precision_lead_to_the_same_image() -> None:
    image, target, matrix = linear(1e-3)
    found = solve_densely(FeatureProblem.of(by(matrix), by(matrix.float()), [target]), image + 0.01)
    assert found is not None
    wanted = torch.linalg.lstsq(matrix, target.value.mT).solution.mT
    assert float((found.images.flatten(1) - wanted).abs().max()) < 0.02 / 255


@pytest.mark.parametrize(("beside", "made"), [(0.01, 2), (0.5 / 255, 1)])
def test_a_jacobian_serves_for_the_next_step_after_a_small_one(
    monkeypatch: pytest.MonkeyPatch, beside: float, made: int
) -> None:
    image, target, matrix = linear(1e-2)
    jacobian, asked = dense_least_squares._jacobian, []
    monkeypatch.setattr(dense_least_squares, "_jacobian", lambda *given: asked.append(1) or jacobian(*given))
    found = solve_densely(FeatureProblem.of(by(matrix), None, [target]), image + beside)
    assert found is not None
    assert bool(found.errors.isfinite().all())
    assert len(asked) == made


def test_no_jacobian_serves_again_where_activations_that_are_closed_in_truth_were_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image, target, matrix = linear(1e-2)
    jacobian, places = dense_least_squares._jacobian, []
    closed = iter([None])
    monkeypatch.setattr(dense_least_squares, "_close_activations", lambda _, images: next(closed, images))
    monkeypatch.setattr(dense_least_squares, "_jacobian", lambda *given: places.append(1) or jacobian(*given))
    found = solve_densely(FeatureProblem.of(by(matrix), None, [target]), image + 0.5 / 255)
    assert found is not None
    assert bool(found.errors.isfinite().all())
    assert len(places) == 2


def test_a_jacobian_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    image, target, matrix = linear(1e-2)
    monkeypatch.setattr(dense_least_squares, "MAX_ENTRIES", 48 * EQUATIONS - 1)
    assert solve_densely(FeatureProblem.of(by(matrix), None, [target]), image) is None
    found = stopped_at(image + 1e-4, 0.0)
    assert torch.equal(finish_densely(by(matrix), by(matrix), [target], found).images, found.images)


def test_near_images_are_brought_to_their_levels_and_far_ones_left_alone() -> None:
    image, target, matrix = linear(1e-3)
    features = by(matrix)
    off = image + 1e-3 * torch.randn(SHAPE, generator=stream(1, "off levels"), dtype=torch.float64)
    near = finish_densely(features, features, [target], stopped_at(off, 2 * NOISE))
    assert float((near.images - image).abs().max()) < 0.1 / 255
    assert bool(near.converged.all())
    assert float(near.residual) < 2 * NOISE
    far = finish_densely(features, features, [target], stopped_at(off, 100 * NOISE))
    assert torch.equal(far.images, off)


@pytest.mark.parametrize("beside", [-1e-8, 1e-8])
def test_a_number_that_only_an_activation_closed_in_truth_would_tell_has_no_error_known(beside: float) -> None:
    """Next to the bound the features above the ReLU hear the number, which in truth they do not."""
    image = torch.rand(SHAPE, generator=stream(2, "pixels"), dtype=torch.float64)
    bound = image[0, 0, 0, 0].clone() - beside

    def features(x: Tensor) -> list[Tensor]:
        flat = x.flatten(1)
        below = torch.cat([flat[:, 1:], flat[:, :1] - bound], 1)
        return [below, torch.cat([below.relu(), below.relu()[:, -1:] * 2 + 1], 1)]

    first, second = features(image)
    closed = first.relu()
    closed[:, -1] = 0
    second[:, -2:] = torch.tensor([0.0, 1.0])
    targets = [FeatureTarget(closed, rectified=True), FeatureTarget(second)]
    found = solve_densely(FeatureProblem.of(features, None, targets), image)
    assert found is not None
    assert not bool(found.errors.isfinite().all())


def test_numbers_behind_ill_conditioned_features_count_as_told_where_their_errors_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undetermined_numbers, "MAX_ITERATIONS", 10)  # conjugate gradients do not end
    image, target, matrix = linear(1e-3)
    features = by(matrix)
    found = finish_densely(features, features, [target], stopped_at(image + 1e-3, 2 * NOISE))
    assert count_undetermined(features, features, [target], found, 0) == 0


@pytest.mark.parametrize("weakest", [1e-4, 1e-5])
def test_numbers_with_errors_of_half_a_level_are_not_told(monkeypatch: pytest.MonkeyPatch, weakest: float) -> None:
    monkeypatch.setattr(undetermined_numbers, "MAX_ITERATIONS", 10)
    image, target, matrix = linear(weakest, noise=1e-5)
    problem = FeatureProblem.of(by(matrix), None, [target])
    assert not undetermined_numbers._are_told_to_half_a_level(problem, image)
