"""Inputs of convolutions below a max pooling are solved for."""

import torch
from torch import Tensor, nn

import attacks
from attacks.base import Reconstruction
from fl.capture import from_batch


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
