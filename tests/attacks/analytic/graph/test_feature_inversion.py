"""Images from features that are known exactly."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.graph import feature_inversion
from attacks.analytic.graph.feature_inversion import (
    MIN_INNER,
    InversionSettings,
    InvertedImages,
    _Search,
    invert_features,
)
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget
from attacks.analytic.graph.gradient_descent import SMOOTH, WIDE
from fl.seeds import stream

PIXELS = (3, 3, 8, 8)


def network(dtype: torch.dtype = torch.float64, *, pooling: bool = False) -> nn.Sequential:
    """Two convolutions with a stride or a pooling between, that end before a ReLU."""
    generator = torch.Generator().manual_seed(1)
    width = 64 if pooling else 24
    layers = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2) if pooling else nn.Identity(),
        nn.Conv2d(width, 64, 3, stride=1 if pooling else 2, padding=1),
    )
    for parameter in layers.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / max(1, parameter[0].numel()) ** 0.5
    return layers.to(dtype).requires_grad_(False)


def pictures(shape: tuple[int, ...] = PIXELS) -> Tensor:
    """Smooth images with values in [0, 1]."""
    generator = torch.Generator().manual_seed(2)
    rough = torch.rand(shape, generator=generator, dtype=torch.float64)
    return functional.avg_pool2d(rough, 3, stride=1, padding=1, count_include_pad=False)


def decibels(found: Tensor, true: Tensor) -> list[float]:
    """Peak signal-to-noise ratio of each image."""
    return [-10 * float(e.log10()) for e in (found - true).square().mean((1, 2, 3)).clamp_min(1e-30)]


@pytest.mark.parametrize("single", [False, True])
def test_images_come_back_from_features(single: bool) -> None:
    layers, images = network(), pictures()
    features = layers(images).relu()
    rough = network(torch.float32)
    result = invert_features(
        lambda z: [layers(z)],
        [FeatureTarget(features, noise=1e-8, rectified=True)],
        PIXELS,
        single_forward=(lambda z: [rough(z)]) if single else None,
    )
    assert bool(result.converged.all())
    assert min(decibels(result.images, images)) > 120


def test_images_of_a_batch_do_not_disturb_each_other() -> None:
    """One image whose features no image has stays open; the others come out as without it."""
    layers, images = network(), pictures()
    features = layers(images).relu()
    features[1] = features[1].flip(0)
    result = invert_features(
        lambda z: [layers(z).relu()],
        [FeatureTarget(features, noise=1e-8)],
        PIXELS,
        settings=InversionSettings(max_steps=30, restarts=1),
    )
    assert result.converged.tolist() == [True, False, True]
    assert float(result.residual[1]) > 1e-3
    assert min(decibels(result.images[[0, 2]], images[[0, 2]])) > 120


def test_an_unknown_scale_of_each_image_is_found_along_the_way() -> None:
    layers, images = network(), pictures()
    features = layers(images).relu() * torch.tensor([0.3, 1.0, 70.0], dtype=torch.float64).reshape(3, 1, 1, 1)
    result = invert_features(
        lambda z: [layers(z)],
        [FeatureTarget(features, noise=1e-8, rectified=True, unknown_scale=True)],
        PIXELS,
    )
    assert bool(result.converged.all())
    assert min(decibels(result.images, images)) > 100


def test_entries_that_are_not_known_do_not_count() -> None:
    layers, images = network(), pictures()
    features = layers(images).relu()
    known = torch.rand(features.shape, generator=torch.Generator().manual_seed(3)) < 0.8
    wrong = torch.where(known, features, torch.full_like(features, 5.0))
    result = invert_features(lambda z: [layers(z).relu()], [FeatureTarget(wrong, known=known, noise=1e-8)], PIXELS)
    assert min(decibels(result.images, images)) > 100


def test_a_target_that_is_zero_for_an_image_does_no_harm() -> None:
    layers, images = network(), pictures()
    features = layers(images).relu()
    zero = torch.zeros(3, 1, dtype=torch.float64)
    targets = [FeatureTarget(features, noise=1e-8), FeatureTarget(zero, noise=1e-8)]
    result = invert_features(lambda z: [layers(z).relu(), 0 * z.sum((1, 2, 3))[:, None]], targets, PIXELS)
    assert min(decibels(result.images, images)) > 100


def test_a_search_at_the_level_of_noise_goes_on_until_pixels_are_at_whole_levels() -> None:
    """Directions of pixels that features hardly tell still move where the residual hardly falls any more."""
    generator, number = torch.Generator().manual_seed(1), 192
    levels = torch.rand((1, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = (255 * levels).round() / 255
    left, right = (torch.randn(number, number, generator=generator, dtype=torch.float64) for _ in range(2))
    shares = torch.logspace(0, math.log10(5e-3), number, dtype=torch.float64)
    matrix = torch.linalg.qr(left)[0] * shares @ torch.linalg.qr(right)[0]
    features = images.flatten(1) @ matrix.mT
    error = torch.randn(features.shape, generator=generator, dtype=torch.float64)
    noisy = features + 3e-7 * features.norm() / error.norm() * error
    settings = InversionSettings(restarts=0, roughness=0.0)
    target = FeatureTarget(noisy, noise=3e-6)
    result = invert_features(lambda z: [z.flatten(1) @ matrix.mT], [target], images.shape, settings=settings)
    assert float((255 * (result.images - images)).abs().max()) < 0.1


def test_the_same_seed_gives_the_same_images() -> None:
    layers, images = network(), pictures()
    features = layers(images).relu()
    settings = InversionSettings(max_steps=3, seed=5)
    first, second = (
        invert_features(lambda z: [layers(z)], [FeatureTarget(features, rectified=True)], PIXELS, settings=settings)
        for _ in range(2)
    )
    assert torch.equal(first.images, second.images)


def test_a_target_of_another_number_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match="2 images for 3 images"):
        invert_features(lambda z: [z], [FeatureTarget(torch.zeros(2, 3, 8, 8))], PIXELS)


def test_a_smooth_prior_and_restarts_help_through_max_pooling() -> None:
    layers, images = network(pooling=True), pictures((8, 3, 8, 8))
    features = layers(images).relu()

    def converged(roughness: float, restarts: int) -> int:
        settings = InversionSettings(roughness=roughness, restarts=restarts, seed=1)
        target = FeatureTarget(features, noise=1e-8)
        result = invert_features(lambda z: [layers(z).relu()], [target], (8, 3, 8, 8), settings=settings)
        right = torch.tensor(decibels(result.images, images)) > 100
        assert not bool((result.converged & ~right).any())
        return int(result.converged.sum())

    assert converged(0.0, 0) < converged(0.1, 0) < converged(0.1, 3)


def test_an_image_with_features_of_no_image_near_is_left_alone_at_its_minimum() -> None:
    """Noise in features that was not announced leaves a residual above it, which no further start lowers."""
    layers, images = network(), pictures()
    features = layers(images)
    features = features + 3e-4 * features.std() * torch.randn(features.shape, generator=stream(3, "noise")).double()
    target = FeatureTarget(features, noise=3e-5)
    once, again = (
        invert_features(lambda z: [layers(z)], [target], PIXELS, settings=InversionSettings(restarts=restarts))
        for restarts in (0, 8)
    )
    assert not bool(again.converged.any())
    assert int(again.steps.max()) < 4 * int(once.steps.max())
    assert min(decibels(again.images, images)) > 50


def test_no_search_begins_after_the_seconds_are_over() -> None:
    layers, images = network(), pictures()
    target = FeatureTarget(layers(images).flip(1), noise=1e-8)
    settings = InversionSettings(restarts=50, seconds=0.0)
    result = invert_features(lambda z: [layers(z)], [target], PIXELS, settings=settings)
    assert int(result.steps.max()) == 0
    assert not bool(result.converged.any())


def test_a_step_ends_early_once_the_seconds_are_over() -> None:
    layers, images = network(), pictures()
    problem = FeatureProblem.of(lambda z: [layers(z)], None, [FeatureTarget(layers(images), noise=1e-8)])
    asked = iter([False])
    search = _Search(
        problem, InversionSettings(), torch.full(PIXELS, 0.5, dtype=torch.float64), lambda: next(asked, True)
    )
    found = search.run()
    assert (int(found.steps.max()), found.iterations) == (1, MIN_INNER)


def test_features_that_point_away_from_a_target_of_unknown_scale_are_turned() -> None:
    def forward(images: Tensor) -> list[Tensor]:
        return [images - 0.9]

    target = FeatureTarget(torch.full((1, 1, 4, 4), 0.1, dtype=torch.float64), unknown_scale=True)
    found = invert_features(forward, [target], (1, 1, 4, 4), settings=InversionSettings(roughness=0))
    assert bool(found.images.isfinite().all())
    assert float(found.residual) < 1e-3


def test_descent_goes_on_where_the_first_search_is_slow() -> None:
    """In a narrow chain of ReLUs Gauss-Newton steps soon fall short. Descent from there comes nearer in fewer."""
    generator = torch.Generator().manual_seed(3)
    layers = nn.Sequential(*[module for _ in range(8) for module in (nn.Linear(60, 60), nn.ReLU())][:-1]).double()
    for parameter in layers.parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = draw / 30**0.5 if parameter.ndim == 2 else 0.1 * draw
    layers.requires_grad_(False)
    image = torch.rand((1, 1, 5, 6), generator=generator, dtype=torch.float64)

    def forward(images: Tensor) -> list[Tensor]:
        return [layers(torch.cat([images.flatten(1), 1 - images.flatten(1)], 1))]

    def search(restarts: int) -> InvertedImages:
        target = FeatureTarget(forward(image)[0].relu(), noise=1e-7, rectified=True)
        settings = InversionSettings(restarts=restarts, roughness=0.0)
        return invert_features(forward, [target], image.shape, settings=settings)

    whole, twice = search(restarts=0), search(restarts=1)
    assert float(twice.residual) < 0.7 * float(whole.residual)
    assert int(twice.steps) < int(whole.steps)


def test_the_first_targets_that_give_enough_equations_weigh_the_same() -> None:
    rectified = torch.tensor([[-1.0, 2.0, 3.0, 0.0]], dtype=torch.float64).relu()
    known = torch.tensor([[True, True, False, True]])
    projection = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))[None]
    targets = [
        FeatureTarget(rectified, known=known, weight=0.1, rectified=True),
        FeatureTarget(torch.ones((1, 2, 3), dtype=torch.float64), weight=0.2, projection=projection),
        FeatureTarget(torch.ones((1, 7), dtype=torch.float64), weight=0.3),
        FeatureTarget(torch.ones((1, 2), dtype=torch.float64)),
    ]
    problem = FeatureProblem.of(lambda z: [z], None, targets)
    assert [target.equations for target in targets] == [1, 4, 7, 2]
    for enough, weights in [(1, [1, 0, 0, 0]), (5, [1, 1, 0, 0]), (5.5, [1, 1, 1, 0]), (99, [1, 1, 1, 1])]:
        assert [target.share for target in problem.of_first_targets(enough).targets] == weights


def stuck_problem() -> tuple[FeatureProblem, Tensor]:
    """Features of eight residual blocks, and a start from which steps of Gauss and Newton get stuck at a kink."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn((5, 3, 3, 3), generator=generator, dtype=torch.float64) / 5
    blocks = [torch.randn((5, 5, 3, 3), generator=generator, dtype=torch.float64) / 6.7 for _ in range(8)]

    def forward(images: Tensor) -> tuple[Tensor]:
        flow = functional.conv2d((images - 0.5) / 0.25, first, padding=1)
        for block in blocks:
            flow = flow + functional.conv2d(functional.relu(flow), block, padding=1)
        return (flow,)

    generator = torch.Generator().manual_seed(9)
    true = torch.rand((1, 3, 6, 6), generator=generator, dtype=torch.float64)
    start = true + 0.3 * torch.randn(true.shape, generator=generator, dtype=torch.float64)
    target = FeatureTarget(forward(true)[0].relu(), rectified=True, noise=1e-7)
    return FeatureProblem.of(forward, None, [target]), start


def test_softened_relus_lead_on_where_steps_are_stuck_between_kinks() -> None:
    problem, start = stuck_problem()
    settings = InversionSettings(roughness=0.0)
    stuck = feature_inversion._Search(problem, settings, start, lambda: False).run()
    assert not bool(stuck.converged.any())
    led = feature_inversion._follow_softened(problem, settings, stuck, lambda: False)
    assert float(led.residual) < 0.8 * float(stuck.residual)
    assert torch.equal(feature_inversion._follow_softened(problem, settings, led, lambda: True).images, led.images)


def test_images_are_searched_for_again_as_went_better_before() -> None:
    image = torch.rand(PIXELS, dtype=torch.float64, generator=stream(0, "pixels"))
    plan = feature_inversion._RestartPlan(cut_short=True)
    assert plan.next(image).annealing_steps == 0
    reached = {WIDE: 0.5, SMOOTH: 0.1}
    courses = []
    for _ in range(4):
        restart = plan.next(image)
        courses.append((restart.course, restart.annealing_steps))
        residual = torch.full((len(image),), reached[restart.course])
        plan.note(restart, InvertedImages(image, residual, residual < 0, residual, 0))
    shortest = feature_inversion.SMOOTH_STEPS
    assert [course for course, _ in courses] == [WIDE, SMOOTH, SMOOTH, SMOOTH]
    assert [steps for _, steps in courses[1:]] == [shortest, 2 * shortest, 4 * shortest]
