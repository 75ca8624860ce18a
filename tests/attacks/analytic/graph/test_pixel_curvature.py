"""The model of J^T J over pixels and frequencies."""

import torch

from attacks.analytic.graph.pixel_curvature import PixelCurvature, cosine_transform, estimate_curvature

SHAPE = (1, 3, 6, 8)


def model() -> PixelCurvature:
    """Colors, rows and columns that differ; frequencies that fall."""
    columns = torch.tensor([1.0, 3.0], dtype=torch.float64).repeat(4)
    colors = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None, None]
    scale = (colors * columns).expand(SHAPE)
    falling = 1 / (1 + torch.arange(6.0)[:, None] + torch.arange(8.0)).double() ** 2
    return PixelCurvature(scale, falling.expand(SHAPE))


def test_cosine_transform_is_orthonormal_and_has_the_mean_first() -> None:
    matrix = cosine_transform(7)
    assert torch.allclose(matrix @ matrix.T, torch.eye(7, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix[0], torch.full((7,), 7**-0.5, dtype=torch.float64))


def draw(seed: int) -> torch.Tensor:
    """Noise of two images' size."""
    return torch.randn((2, *SHAPE[1:]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_dividing_undoes_multiplying_and_coordinates_have_the_model_as_their_square() -> None:
    curvature, images, coordinates = model(), draw(0), draw(1)
    assert torch.allclose(curvature.divide(curvature.multiply(images)), images)
    moved = curvature.color(coordinates)
    assert torch.allclose((moved * curvature.multiply(moved)).sum(), coordinates.square().sum())


def test_pixels_that_say_nothing_have_a_diagonal_of_their_own() -> None:
    pulled = [draw(seed) for seed in range(8)]
    for one in pulled:
        one[..., -1] = 0
    curvature, images = estimate_curvature(pulled), draw(9)
    assert torch.allclose(curvature.divide(images)[..., -1], images[..., -1] / curvature.silent)
    heard = images.clone()
    heard[..., -1] = 5
    assert torch.equal(curvature.divide(heard)[..., :-1], curvature.divide(images)[..., :-1])
    moved = curvature.color(images)
    assert not bool(moved[..., -1].any())
    assert bool((moved[..., :-1] != 0).all())


def test_estimate_tells_positions_and_frequencies_that_matter_more() -> None:
    """J^T e of a network whose J^T J is the model: its root times noise of unit covariance."""
    true, generator = model(), torch.Generator().manual_seed(0)
    signs = [torch.randn((4, *SHAPE[1:]), generator=generator, dtype=torch.float64) for _ in range(16)]
    found = estimate_curvature([true.scale * true._back(true.frequencies.sqrt() * e) for e in signs])
    images = torch.randn((8, *SHAPE[1:]), generator=generator, dtype=torch.float64)
    modeled = true.multiply(images)
    plain = (found.scale[..., 1::2].mean() / found.scale[..., ::2].mean()).item()
    assert 2.0 < plain < 4.0
    left = found.divide(modeled) - images
    assert float(left.norm()) < 1 * float(images.norm())
    whole = float((images * found.multiply(images)).sum() / (images * modeled).sum())
    assert 0.7 < whole < 1.4
    even = modeled / modeled.norm() * images.norm()
    assert float((even - images).norm()) > 0.5 * float(images.norm())
    assert float(found.frequencies[..., 0, 0].mean() / found.frequencies[..., -1, -1].mean()) > 20
