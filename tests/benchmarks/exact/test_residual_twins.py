"""`benchmarks.exact.residual_twins`: twins share a gradient, and where equations are enough there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.exact import residual_twins
from benchmarks.exact.residual_twins import SIZES, Passage, document, find_twin
from benchmarks.exact.residual_victims import gradients
from eval.metrics import image
from fl.models.building_blocks.layers import Normalize
from fl.types import Batch


class Body(nn.Module):
    """A stem, and a convolution above it."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, filters, 5, 2, 2, bias=False), nn.BatchNorm2d(filters)
        self.maxpool, self.above = nn.MaxPool2d(3, 2, 1), nn.Conv2d(filters, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.maxpool(self.bn1(self.conv1(x)).relu())).relu().mean((2, 3))


class Network(nn.Module):
    def __init__(self, filters: int) -> None:
        super().__init__()
        self.normalize, self.body = Normalize((0.5,) * 3, (0.25,) * 3), Body(filters)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.normalize(x)))


def twin_of(filters: int, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Batch, Tensor, bool]:
    """A network of so many filters in the stem, its picture, a twin begun at gray, and whether it is one."""
    monkeypatch.setattr(residual_twins, "ITERATIONS", 60)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        network = Network(filters).eval()
    pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    images = Batch(pictures, torch.tensor([3]))
    passage = Passage.of(copy.deepcopy(network), images)
    twin, done = find_twin(passage, pictures.double(), torch.full_like(pictures, 0.5))
    return network.double(), Batch(pictures.double(), images.labels), twin, done


def test_a_twin_has_the_same_gradient_and_is_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images, twin, done = twin_of(4, monkeypatch)
    assert done
    assert float(image.psnr(twin.float(), images.inputs.float())) < 30
    own, others = gradients(network, images), gradients(network, Batch(twin, images.labels))
    for one, other in zip(own, others, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(one.norm())


def test_where_equations_are_enough_the_picture_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, images, twin, done = twin_of(32, monkeypatch)
    assert done
    assert float(image.psnr(twin.float(), images.inputs.float())) > 60


def test_what_the_network_makes_is_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        network: Any = Network(4).eval()
    images = Batch(torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([3]))
    passage = Passage.of(copy.deepcopy(network), images)
    made = network.body.bn1(network.body.conv1(network.normalize(images.inputs)))
    torch.testing.assert_close(passage.outputs(images.inputs), made, rtol=1e-4, atol=1e-5)
    assert float((made - passage.bounds).detach()[~passage.passed].max()) < 1e-5


def test_each_size_and_start_has_a_line() -> None:
    row: dict[str, Any] = {"victim": 0, "numbers": 12288, "equations": 18000, "found": True, "psnr": 100.0}
    row |= {"off": 1e-8, "rounding": 9e-7, "worst": 0.1, "tensor": "head.bias", "seconds": 1.0}
    lines = document([{"case": SIZES[0].name, "start": "gray", **row}])
    assert "| 64 x 64 | gray | 1 | 12288 | 18000 | 1 of 1 | 100.0 (100.0 to 100.0) | 1.0e-08 | 9.0e-07 | 0.1 |" in lines
    assert not any("224 x 224" in line for line in lines)


def test_a_picture_that_one_tensor_tells_apart_is_no_twin() -> None:
    row: dict[str, Any] = {"case": SIZES[1].name, "start": "gray", "numbers": 12288, "equations": 18000, "found": True}
    row |= {"off": 1e-8, "rounding": 9e-7, "tensor": "head.bias", "seconds": 1.0, "psnr": 30.0}
    told = [{**row, "victim": number, "worst": worst} for number, worst in enumerate((0.1, 2.0))]
    lines = document([*told, {**row, "victim": 2, "worst": 0.1, "psnr": 50.0}])
    assert "| 224 x 224 | 3 | 1 |" in lines
