"""Inputs of convolutions below a max pooling are solved for."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.analytic.graph.pooled_layer import CAVITY_NEAR, COOLING, _is_near, _search_input
from attacks.analytic.maxpool.annealing import anneal
from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.refinement import evaluate
from attacks.base import Reconstruction
from fl.capture import from_batch
from fl.seeds import stream


def chain() -> nn.Module:
    """Two convolutions before a max pooling, as VGG has them, for pictures of 12 by 12 pixels."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 80, 3, padding=1, bias=False), nn.BatchNorm2d(80), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(80, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 96, 3, 2, padding=1), nn.ReLU()),
            *(nn.Conv2d(96, 96, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
        ).eval()
        nn.init.normal_(model[3].weight)  # of both signs
    return model


def picture() -> Tensor:
    return torch.randint(256, (1, 3, 12, 12), generator=torch.Generator().manual_seed(1)) / 255


def test_pictures_come_back_through_two_convolutions_and_max_pooling() -> None:
    images = picture()
    view, _ = from_batch(chain(), images, torch.tensor([3]))
    result = attacks.build("backsolve")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert bool(((result.inputs - images).abs() < 1e-4).all())
    (layer,) = result.private
    assert layer == "features/0.weight"


def deep_layer(seed: int) -> tuple[Equations, Tensor]:
    """A convolution of 24 rectified, smooth feature maps below a max pooling, and its input."""
    draw = stream(seed, "deep layer")

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    smooth = functional.interpolate(randn(1, 24, 4, 4), size=12, mode="bicubic")[0]
    x, weight = (smooth + 0.2 * randn(*smooth.shape)).relu(), randn(48, 24, 3, 3) / 15
    layer = ConvPoolLayer(weight, torch.zeros(48).double(), (24, 12, 12), (1, 1), window=(2, 2))
    target = layer.pooled_outputs(x).relu()
    open_, signal = target > 0, randn(*target.shape) * (target > 0)
    passed = functional.one_hot(layer.outputs(x).argmax(-1), 4).double()
    gradient = layer.weight_gradient(layer.scatter(passed * signal[..., None]), x)
    gradient = gradient + 1e-7 * gradient.std() * randn(*gradient.shape)
    precision = torch.full_like(target, 1e-6 * float(target.max()))
    return Equations(layer, gradient, target, signal, open_, precision, torch.ones_like(target), 1e-6), x


@pytest.mark.parametrize("seed", [0, 1])
def test_positions_that_annealing_gets_wrong_are_decided_by_other_filters(seed: int) -> None:
    equations, x = deep_layer(seed)
    annealed, _ = anneal(equations, COOLING, lambda x: _is_near(equations, x))
    assert evaluate(equations, annealed).gradient_error > 3 * CAVITY_NEAR
    found = _search_input(equations)
    assert evaluate(equations, found).gradient_error < CAVITY_NEAR
    assert float((found - x).norm() / x.norm()) < 1e-2
