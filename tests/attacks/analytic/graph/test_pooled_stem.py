"""Pictures come back through a stem of convolution, ReLU and max pooling."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.base import Reconstruction
from fl.capture import from_batch


class PooledNetwork(nn.Module):
    """A stem with max pooling, two convolutions and a linear layer, for pictures of 16 by 16 pixels."""

    def __init__(self, *, pool_first: bool) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.stem, self.norm = nn.Conv2d(3, 48, 5, padding=2), nn.BatchNorm2d(48)
        self.one, self.two = nn.Conv2d(48, 96, 3, padding=1, bias=False), nn.Conv2d(96, 96, 3, 2, padding=1)
        self.top, self.head = nn.Conv2d(96, 96, 3, padding=1), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem((x - 0.4) / 0.3))
        if self.pool_first:
            x = functional.max_pool2d(x, 3, 2, 1).relu()
        else:
            x = functional.max_pool2d(functional.relu(x), 3, 2, 1)
        x = functional.relu(self.two(functional.relu(self.one(x))))
        return self.head(functional.relu(self.top(x)).mean((2, 3)))


def victim(*, pool_first: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = PooledNetwork(pool_first=pool_first).eval()
        nn.init.normal_(model.norm.weight)  # of both signs
        nn.init.normal_(model.norm.bias)
        nn.init.normal_(model.norm.running_mean, std=0.1)
    return model


def picture() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 4, 4, generator=draw)
    smooth = functional.interpolate(coarse, size=16, mode="bicubic", align_corners=False).clamp(0, 1)
    return (255 * smooth).round() / 255


class TwoConvolutions(nn.Module):
    """Two convolutions before a max pooling, the second with fewer equations than its input has numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.one, self.two = nn.Conv2d(32, 96, 3, padding=1), nn.Conv2d(96, 96, 3, 2, padding=1)
        self.top, self.head = nn.Conv2d(96, 96, 3, padding=1), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.second(self.first(4 * x - 2).relu()), 2).relu()
        x = functional.relu(self.two(functional.relu(self.one(x))))
        return self.head(functional.relu(self.top(x)).mean((2, 3)))


def test_a_picture_comes_back_through_two_convolutions_before_max_pooling() -> None:
    images = picture()
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        view, _ = from_batch(TwoConvolutions().eval(), images, torch.tensor([3]))
    result = attacks.build("backsolve")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert bool(((result.inputs - images).abs() < 1e-4).all())


@pytest.mark.parametrize("pool_first", [False, True])
def test_a_picture_comes_back_through_max_pooling(*, pool_first: bool) -> None:
    images = picture()
    view, _ = from_batch(victim(pool_first=pool_first), images, torch.tensor([3]))
    result = attacks.build("backsolve")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.verified
    assert bool(((result.inputs - images).abs() < 1e-4).all())
