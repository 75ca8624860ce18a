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
