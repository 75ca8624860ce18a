"""Linear layers that are given pixels, wherever these lie, and what flows back into them."""

from __future__ import annotations

import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks.network.operation_trace import Graph, trace_operations
from attacks.network.pixel_layers import PixelNetwork, pixel_layers
from fl.losses.cross_entropy import CrossEntropy
from fl.seeds import stream

SHAPE = (1, 4, 4)


class Several(nn.Module):
    """Two layers of parts of a picture, one of all of it turned and normalized, and one of what these return."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 5, bias=False), nn.Linear(8, 5)
        self.turned, self.head = nn.Linear(16, 5), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat, turned = x.flatten(1), (x.transpose(2, 3).flatten(1) - 0.5) / 0.25
        parts = self.low(flat[:, :8]), self.high(flat[:, 8:]), self.turned(turned)
        out: Tensor = self.head(torch.cat(parts, 1).tanh())
        return out


def traced(model: nn.Module) -> Graph:
    graph = trace_operations(model, torch.rand(1, *SHAPE, dtype=torch.float64, generator=stream(0, "probe")))
    assert isinstance(graph, Graph)
    return graph


def test_what_they_are_given_is_told_pixel_by_pixel() -> None:
    model = chains.initialized(Several())
    layers = {layer.weight: layer for layer in pixel_layers(traced(model), dict(model.named_parameters()))}
    assert list(layers) == ["low.weight", "high.weight", "turned.weight"]
    assert layers["high.weight"].index.tolist() == list(range(8, 16))
    turned = layers["turned.weight"]
    assert turned.index.tolist() == torch.arange(16).view(4, 4).T.flatten().tolist()
    assert torch.allclose(turned.slope, torch.full_like(turned.slope, 4.0))
    assert torch.allclose(turned.offset, torch.full_like(turned.offset, -2.0))


def test_signals_are_each_picture_s_own() -> None:
    model = chains.initialized(Several())
    graph = traced(model)
    network = PixelNetwork(graph, pixel_layers(graph, {"low.weight", "turned.weight"}))
    pictures = torch.rand(3, *SHAPE, dtype=torch.float64, generator=stream(1, "pictures"))
    low, turned = network.signals(pictures, torch.tensor([0, 2]), CrossEntropy())
    assert low.shape == turned.shape == (2, 3, 5)
    for k, label in enumerate((0, 2)):
        for picture, signal in zip(pictures, low[k], strict=True):
            loss = functional.cross_entropy(model(picture[None]), torch.tensor([label]))
            (grad,) = torch.autograd.grad(loss, model.get_parameter("low.weight"))
            assert torch.allclose(grad, torch.outer(signal, picture.flatten()[:8]))


def test_a_weight_that_is_used_twice_is_left_out() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x.flatten(1)[:, :8]) - self.one(x.flatten(1)[:, 8:])
            return out

    assert pixel_layers(traced(chains.initialized(Twice())), {"one.weight"}) == []
