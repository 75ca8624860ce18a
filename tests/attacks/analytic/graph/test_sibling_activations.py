"""What a ReLU returned follows from other activations of the same numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.seeds import stream


class Dense(nn.Module):
    """A tensor that two normalizations take, alone and beside what a layer made of it."""

    def __init__(self, change: Callable[[nn.BatchNorm2d, nn.BatchNorm2d], None]) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.inner, self.outer, self.head = nn.BatchNorm2d(6), nn.BatchNorm2d(10), nn.Linear(10, 3)
        change(self.inner, self.outer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.layer(torch.relu(self.inner(x)))], 1)
        return self.head(torch.relu(self.outer(x)).mean((2, 3)))


def outer_output(change: Callable[[nn.BatchNorm2d, nn.BatchNorm2d], None]) -> tuple[Callable[[], Tensor], Tensor]:
    """Return what is known of the upper ReLU's output where the lower one's was solved for, and the truth."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = Dense(change).double().eval()
    images = torch.rand(2, 2, 5, 5, generator=stream(0, "siblings"), dtype=torch.float64)
    graphs = [trace_operations(model, x) for x in (images, images[:1])]
    assert all(isinstance(graph, Graph) for graph in graphs)
    network = NetworkGraph(graphs[0], graphs[1], {n: torch.ones_like(v) for n, v in model.named_parameters()})  # type: ignore[arg-type]
    whole, known = Propagation(network), Propagation(network)
    whole.set_value(Ref(IMAGE), images)
    lower, upper = network.activations
    known.set_value(Ref(lower), whole.value(Ref(lower)))
    return lambda: known.value(Ref(upper)), whole.value(Ref(upper))


def test_an_open_one_tells_the_number_and_a_closed_one_that_others_are_closed() -> None:
    told, true = outer_output(lambda inner, outer: None)
    assert torch.allclose(told(), true, atol=1e-12)


def test_bounds_are_carried_over_shifts_and_scales() -> None:
    def lower_bias(inner: nn.BatchNorm2d, outer: nn.BatchNorm2d) -> None:
        outer.weight.data.fill_(0.5)
        outer.bias.data.fill_(-0.1)  # whatever is below zero in the lower one is so here

    told, true = outer_output(lower_bias)
    assert torch.allclose(told(), true, atol=1e-12)


def test_a_number_that_may_lie_on_either_side_stays_unknown() -> None:
    told, _ = outer_output(lambda inner, outer: outer.bias.data.fill_(0.1))
    with pytest.raises(UnknownError):
        told()
    told, _ = outer_output(lambda inner, outer: outer.weight.data.fill_(-1.0))
    with pytest.raises(UnknownError):
        told()
