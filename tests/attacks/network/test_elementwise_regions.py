"""Activations in pieces are found by what they do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.network.elementwise_regions import find_activations, with_activations
from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.seeds import stream

aten = torch.ops.aten


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.below, self.function, self.above = nn.Conv2d(1, 3, 3), function, nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.above(self.function(self.below(x)))
        return out


def traced(function: Callable[[Tensor], Tensor]) -> Graph:
    model = Between(function).double()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=stream(0, "between")))
    graph = trace_operations(model, torch.rand(1, 1, 8, 8, generator=stream(0, "image"), dtype=torch.float64))
    assert isinstance(graph, Graph)
    return graph


def gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], object, tuple[float, ...]]] = {
    "relu": (lambda x: (x + x.abs()) / 2, aten.relu.default, ()),
    "scaled relu": (lambda x: torch.relu(4 * x) / 4, aten.relu.default, ()),
    "leaky": (lambda x: torch.relu(x) - 0.1 * torch.relu(-x), aten.leaky_relu.default, (0.1,)),
    "leaky by abs": (lambda x: 0.55 * x + 0.45 * x.abs(), aten.leaky_relu.default, (0.1,)),
    "relu6": (lambda x: torch.minimum(torch.relu(x), torch.tensor(6.0)), aten.hardtanh.default, (0.0, 6.0)),
    "hardtanh": (lambda x: x.clamp(min=-1).clamp(max=1), aten.hardtanh.default, (-1.0, 1.0)),
    "sigmoid": (lambda x: (1 + torch.exp(-x)).reciprocal(), aten.sigmoid.default, ()),
    "silu": (lambda x: x * torch.sigmoid(x), aten.silu.default, ()),
    "silu by exp": (lambda x: x / (1 + torch.exp(-x)), aten.silu.default, ()),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), aten.gelu.default, ()),
    "gelu by tanh": (gelu_by_tanh, aten.gelu.default, ()),
    "elu": (lambda x: torch.where(x > 0, x, x.exp() - 1), aten.elu.default, (1.0,)),
    "mish": (lambda x: x * torch.tanh(functional.softplus(x)), aten.mish.default, ()),
    "hardswish": (lambda x: x * functional.relu6(x + 3) / 6, aten.hardswish.default, ()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_activation_in_pieces_becomes_one_operation(name: str) -> None:
    function, op, settings = KNOWN[name]
    graph = traced(function)
    joined = with_activations(graph, find_activations(graph))
    used = [joined.nodes[number] for number in joined.used_operations()]
    assert [node.operation for node in used[:1] + used[2:]] == ["convolution"] * 2
    assert used[1].op is op
    assert tuple(used[1].args[1 : 1 + len(settings)]) == pytest.approx(settings)
    image = torch.rand(1, 1, 8, 8, generator=stream(1, "image"), dtype=torch.float64)
    assert joined.returned is not None
    old, new = (g.replay(g.used_operations(), joined.returned, {Ref(IMAGE): image}) for g in (graph, joined))
    torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 * torch.relu(x),
        lambda x: torch.relu(x) * 1.0,
        lambda x: torch.relu(x) + x.mean((2, 3), keepdim=True),
        lambda x: torch.where(torch.arange(6.0) > 2, x, torch.relu(x)),
        lambda x: x * torch.sigmoid(1.7 * x),
        nn.PReLU(3).double(),
        lambda x: x + 0.0,
    ],
)
def test_what_is_no_known_activation_stays_as_it_is(function: Callable[[Tensor], Tensor]) -> None:
    graph = traced(function)
    joined = with_activations(graph, find_activations(graph))
    assert [node.op for node in joined.nodes] == [node.op for node in graph.nodes]
    assert joined.used_operations() == graph.used_operations()
