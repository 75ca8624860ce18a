"""Values and signals over a traced network are those of its forward and backward pass."""

import inspect
import sys

import pytest
import torch
from torch import Tensor, nn

from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.network.curved_activations import MonotoneActivation
from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.seeds import stream


class Net(nn.Module):
    """A block with a shortcut, a scaling, a sum and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        below = torch.relu(self.one(x))
        above = torch.nn.functional.leaky_relu(2 * self.two(below) + below, 0.1)
        return self.head(above.mean((2, 3)))


def world() -> tuple[NetworkGraph, nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = Net().double()
    images = torch.rand(2, 2, 5, 5, generator=stream(0, "propagation"), dtype=torch.float64)
    graphs = [trace_operations(model, x) for x in (images, images[:1])]
    assert all(isinstance(graph, Graph) for graph in graphs)
    grads = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    return NetworkGraph(graphs[0], graphs[1], grads), model, images  # type: ignore[arg-type]


def test_layers_and_activations_are_read() -> None:
    network, _, _ = world()
    assert [layer.name for layer in network.layers.values()] == ["one.weight", "two.weight", "head.weight"]
    assert [activation.slope for activation in network.activations.values()] == [0.0, 0.1]


def test_signals_are_those_of_autograd() -> None:
    network, model, images = world()
    known = Propagation(network)
    with pytest.raises(UnknownError):
        known.signal(Ref(IMAGE))
    draw = torch.randn(2, 3, generator=stream(1, "propagation"), dtype=torch.float64)
    at = images.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(model(at), at, draw)
    assert network.graph.returned is not None
    known.set_value(Ref(IMAGE), images)
    known.set_signal(network.graph.returned, draw)
    assert torch.allclose(known.signal(Ref(IMAGE)), wanted, atol=1e-12)
    assert torch.allclose(known.value(network.graph.returned), model(images), atol=1e-12)


def test_a_mask_changes_what_lies_below_it_alone() -> None:
    network, _, images = world()
    known = Propagation(network)
    assert network.graph.returned is not None
    known.set_value(Ref(IMAGE), images)
    known.set_signal(network.graph.returned, torch.ones(2, 3, dtype=torch.float64))
    lower, upper = network.activations
    before, above = known.signal(Ref(IMAGE)), known.signal(Ref(upper))
    known.set_mask(lower, torch.zeros_like(known.value(Ref(lower)), dtype=torch.bool))
    assert not known.signal(Ref(IMAGE)).any()
    assert before.any()
    assert known.signal(Ref(upper)) is above


def test_what_a_curved_activation_took_is_worked_out_once_for_what_it_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ELU(), nn.Flatten(), nn.Linear(100, 3)).double()
    images = torch.rand(1, 2, 5, 5, generator=stream(0, "propagation"), dtype=torch.float64)
    graph = trace_operations(model, images)
    assert isinstance(graph, Graph)
    network = NetworkGraph(graph, graph, {name: torch.ones_like(value) for name, value in model.named_parameters()})
    (activation,) = network.curved_activations
    inverted: list[Tensor] = []
    inverse = MonotoneActivation.inverse

    def count(self: MonotoneActivation, values: Tensor) -> tuple[Tensor, Tensor]:
        inverted.append(values)
        return inverse(self, values)

    monkeypatch.setattr(MonotoneActivation, "inverse", count)
    known, out = Propagation(network), model[:2](images).detach()
    assert graph.returned is not None
    known.set_signal(graph.returned, torch.ones(1, 3, dtype=torch.float64))
    for value, times in ((out, 1), (out, 1), (out / 2, 2)):
        known.set_value(Ref(activation), value)
        known.restore(known.signals, known.masks)  # forgets what followed from signals
        at = value.clone().requires_grad_()
        (upper,) = torch.autograd.grad(model[2:](at).sum(), at)
        slope = torch.where(value > 0, 1.0, value + 1)  # of an ELU, by what it returned
        assert torch.allclose(known.signal(network.flows_into(activation)[0]), slope * upper, atol=1e-7)
        assert len(inverted) == times


def test_a_signal_goes_up_through_scalings_and_sums() -> None:
    network, _, _ = world()
    known = Propagation(network)
    (number,) = [n for n, layer in network.layers.items() if layer.name == "two.weight"]
    known.set_signal(Ref(number), torch.ones(2, 6, 5, 5, dtype=torch.float64))
    taken = network.flows_into(list(network.activations)[1])[0]
    assert torch.allclose(known.signal(taken), torch.full((2, 6, 5, 5), 0.5, dtype=torch.float64))


def test_a_network_deeper_than_the_recursion_limit_is_worked_through() -> None:
    """What follows from what over hundreds of operations is no deep recursion."""
    depth, width = 150, 512

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(depth):
                x = torch.relu(x + 0.5)
            return self.head(x)

    model, images = Deep().double(), torch.rand(1, width, generator=stream(0, "deep"), dtype=torch.float64)
    graph = trace_operations(model, images)
    assert isinstance(graph, Graph)
    network = NetworkGraph(graph, graph, {name: torch.ones_like(value) for name, value in model.named_parameters()})
    known, limit = Propagation(network), sys.getrecursionlimit()
    assert graph.returned is not None
    assert network.activations
    try:
        sys.setrecursionlimit(len(inspect.stack()) + depth)
        with pytest.raises(UnknownError):
            known.signal(Ref(IMAGE))
        known.set_value(Ref(IMAGE), images)
        value = known.value(graph.returned)
        known.set_signal(graph.returned, torch.ones(1, 3, dtype=torch.float64))
        signal = known.signal(Ref(IMAGE))
    finally:
        sys.setrecursionlimit(limit)
    assert torch.equal(value, model(images))
    assert torch.allclose(signal, model.head.weight.sum(0, keepdim=True))
