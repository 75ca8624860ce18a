"""Searches over pixels by gradients alone."""

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.feature_inversion import ANNEALING_STEPS
from attacks.analytic.graph.gradient_descent import SMOOTH, anneal, descend
from attacks.analytic.graph.pixel_curvature import PixelCurvature

SHAPE = (2, 3, 6, 6)


def never() -> bool:
    """Time is never up."""
    return False


def pictures() -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def even() -> PixelCurvature:
    """A model of the curvature that knows nothing."""
    ones = torch.ones((1, *SHAPE[1:]), dtype=torch.float64)
    return PixelCurvature(ones, ones)


def test_annealing_passes_kinks_of_a_deep_network_in_which_descent_gets_stuck() -> None:
    generator, true = torch.Generator().manual_seed(3), pictures()
    first = torch.randn(16, 3, 3, 3, generator=generator, dtype=torch.float64) / 5
    blocks = [torch.randn(16, 16, 3, 3, generator=generator, dtype=torch.float64) / 12 for _ in range(20)]

    def features(images: Tensor) -> Tensor:
        flow = functional.conv2d((images - 0.5) / 0.25, first, padding=1)
        for block in blocks:
            flow = flow + functional.conv2d(flow.relu(), block, padding=1)
        return flow.relu()

    wanted = features(true)

    def misfit(images: Tensor) -> Tensor:
        return ((features(images) - wanted) / wanted.norm()).square().flatten(1).sum(1)

    start = 0.5 + 0.1 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    annealed = descend(misfit, anneal(misfit, start, ANNEALING_STEPS, never), even(), 100, 1e-12, never)
    stuck = descend(misfit, start, even(), 100, 1e-12, never)
    assert bool((misfit(annealed) < 0.5 * misfit(stuck)).all())


def test_smooth_annealing_takes_patterns_that_nothing_hears_from_the_pictures_around() -> None:
    """Features that hear means over windows alone leave what the start had of finer patterns, but for the prior."""
    shape = (2, 3, 12, 12)
    coarse = torch.rand((2, 3, 3, 3), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    true = functional.interpolate(coarse, size=shape[2:], mode="bilinear")

    def misfit(images: Tensor) -> Tensor:
        return functional.avg_pool2d(images - true, 2).square().flatten(1).sum(1)

    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    start = 0.5 + 0.1 * noise
    off = [
        (found - true).square().flatten(1).mean(1)
        for found in (anneal(misfit, start, 400, never, SMOOTH), anneal(misfit, start, 400, never))
    ]
    assert bool((off[0] < 0.5 * off[1]).all())


def test_annealing_stays_in_range_and_returns_the_best_that_it_met() -> None:
    true = 3 * pictures() - 1
    seen: list[Tensor] = []

    def misfit(images: Tensor) -> Tensor:
        assert bool(((images >= 0) & (images <= 1)).all())
        value = (images - true).square().flatten(1).sum(1)
        seen.append(value.detach())
        return value

    found = anneal(misfit, torch.full(SHAPE, 0.5, dtype=torch.float64), 60, never)
    assert torch.allclose(misfit(found), torch.stack(seen).amin(0))


def test_descent_reaches_each_image_of_a_batch_by_its_own_steps() -> None:
    """Two problems of which one is a thousand times as large, with curvatures from 1 to 1000."""
    true = pictures()
    weights = torch.logspace(0, 1.5, true[0].numel(), dtype=torch.float64).reshape(SHAPE[1:])
    sizes = torch.tensor([1.0, 1000.0], dtype=torch.float64)[:, None, None, None]

    def misfit(images: Tensor) -> Tensor:
        return (sizes * weights * (images - true)).square().flatten(1).sum(1)

    found = descend(misfit, torch.full(SHAPE, 0.5, dtype=torch.float64), even(), 300, 1e-20, never)
    assert float((found - true).abs().max()) < 1e-9
    assert torch.allclose(descend(misfit, true, even(), 300, 1e-20, never), true)


def test_nothing_moves_once_time_is_up() -> None:
    start = pictures()

    def misfit(images: Tensor) -> Tensor:
        return images.square().flatten(1).sum(1)

    assert torch.equal(anneal(misfit, start, 10, lambda: True), start)
    assert torch.allclose(descend(misfit, start, even(), 10, 0.0, lambda: True), start)
