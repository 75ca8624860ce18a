"""A trace in another precision computes in that alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.runtime.double_precision import DoubleForm
from fl.seeds import stream


class Masked(nn.Module):
    """Masks its numbers by their signs, in the type of its input and in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return self.head((h * (h > 0).to(h.dtype)) * ((h > 0).float() @ torch.eye(8)) + 0 * h.float())


def test_types_that_a_network_names_follow_the_traces_precision() -> None:
    model = DoubleForm(fixes_single=True).apply(Masked().double())
    images = torch.rand(2, 1, 4, 4, generator=stream(0, "images"), dtype=torch.float64)
    graph = trace_operations(model, images)
    assert isinstance(graph, Graph)
    single = NetworkGraph(graph, graph, {}).graph_in_precision(torch.float32)
    assert single.returned is not None
    found = single.replay(single.used_operations(), single.returned, {Ref(IMAGE): images.float()})
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), model(images), atol=1e-5)


def test_what_flows_back_hangs_on_no_memory_layout() -> None:
    """Batch normalization's backward of PyTorch 2.15 returns other numbers for channels that lie together."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    draw = torch.Generator().manual_seed(0)
    nn.init.uniform_(model[1].weight, 1, 2, generator=draw)
    graph = trace_operations(model.double(), torch.rand(1, 3, 4, 5, generator=draw, dtype=torch.float64))
    assert isinstance(graph, Graph)
    network = NetworkGraph(graph, graph, {})
    number = max(network.consumers[Ref(0)])
    signal = torch.rand(4, 5, 1, 3, generator=draw, dtype=torch.float64).permute(2, 3, 0, 1)
    apart = network.pull_back(number, signal.contiguous(), Ref(0))
    assert torch.equal(network.pull_back(number, signal, Ref(0)), apart)
    assert not torch.allclose(apart, signal)


class Unreached(nn.Module):
    """Has operations that no gradient passes: new tensors, comparisons, signs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.maximum(x, torch.zeros_like(x)) * (x > 0) + x * x.sign()
        return torch.where(x > 1, x, x - 1).sum((2, 3))


def test_nothing_flows_back_where_no_gradient_leads() -> None:
    draw = torch.Generator().manual_seed(0)
    graph = trace_operations(Unreached(), torch.randn(1, 2, 4, 4, generator=draw, dtype=torch.float64))
    assert isinstance(graph, Graph)
    network = NetworkGraph(graph, graph, {})
    silent = set()
    for number in network.used:
        signal = torch.ones_like(network.run(number, {}), dtype=torch.float64)
        for ref in network.flows_into(number):
            found = network.pull_back(number, signal, ref)
            assert found.shape == graph.value(ref).shape
            assert found.is_floating_point()
            if not found.any():
                silent.add((graph.nodes[number].operation, graph.value(ref).dtype))
    masks = {("mul", torch.bool), ("where", torch.bool)}
    assert silent - {("maximum", torch.float64)} == {(n, torch.float64) for n in ("zeros_like", "gt", "sign")} | masks
