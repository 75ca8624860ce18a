"""What activations above returned are linear equations for a tensor below."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks.analytic.graph.layer_solves import KnownSignal, count_shortfall, solve_input
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.output_equations import OutputEquations, find_output_equations
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from attacks.network.operation_trace import IMAGE, Graph, Ref, trace_operations
from fl.seeds import stream


class Block(nn.Module):
    """A strided block with a shortcut, behind one convolution."""

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.one, self.norm = nn.Conv2d(8, 32, 3, 2, 1), nn.BatchNorm2d(32)
        self.two, self.short = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(8, 32, 1, 2)
        self.head, self.slope = nn.Linear(32, 3), slope

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        inner = nn.functional.leaky_relu(self.norm(self.one(x)), self.slope)
        return self.head(torch.relu(self.two(inner) + self.short(x)).mean((2, 3)))


class World:
    """A batch's step on the block: what is known of it, and its tensors."""

    def __init__(self, count: int, slope: float = 0.0, kind: Callable[[], nn.Module] | None = None) -> None:
        with torch.random.fork_rng():
            torch.random.default_generator.manual_seed(0)
            model = (Block(slope) if kind is None else kind()).double().eval()
        self.images = torch.rand(count, 2, 8, 8, generator=stream(0, "block"), dtype=torch.float64)
        graphs = [trace_operations(model, x) for x in (self.images, self.images[:1])]
        assert all(isinstance(graph, Graph) for graph in graphs)
        signal = torch.randn(count, 3, generator=stream(1, "block"), dtype=torch.float64)
        names, values = zip(*model.named_parameters(), strict=True)
        sent = dict(zip(names, torch.autograd.grad(model(self.images), values, signal), strict=True))
        self.network = NetworkGraph(graphs[0], graphs[1], sent)  # type: ignore[arg-type]
        whole = Propagation(self.network)
        whole.set_value(Ref(IMAGE), self.images)
        assert self.network.graph.returned is not None
        whole.set_signal(self.network.graph.returned, signal)
        self.whole = whole
        self.layers = {layer.name: number for number, layer in self.network.layers.items()}
        self.start = self.network.layer_input(self.layers["one.weight"])
        self.true = whole.value(self.start)
        self.known = Propagation(self.network)
        self.known.set_signal(self.network.graph.returned, signal)
        for number in self.network.activations:
            if number > self.start.node:
                self.known.set_value(Ref(number), whole.value(Ref(number)))

    def outputs(self) -> OutputEquations | None:
        return find_output_equations(self.known, self.start, self.true.shape)


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_the_true_tensor_answers_them_and_each_open_output_is_one(slope: float) -> None:
    world = World(2, slope)
    outputs = world.outputs()
    assert outputs is not None
    for made, wanted in zip(outputs.push(world.true), outputs.right_side(), strict=True):
        assert torch.allclose(made, wanted, atol=1e-10)
    inner, upper = (world.whole.value(Ref(n)) for n in world.network.activations if n > world.start.node)
    assert outputs.count == int((upper > 0).sum()) + (inner.numel() if slope else int((inner > 0).sum()))
    draw = torch.randn(world.true.shape, generator=stream(2, "block"), dtype=torch.float64)
    seen = outputs.push(draw)
    assert sum(float((s * s).sum()) for s in seen) == pytest.approx(float((draw * outputs.pull(seen)).sum()))


def test_outputs_say_nothing_where_something_else_flows_in_unknown() -> None:
    world = World(1)
    inner, upper = (Ref(n) for n in world.network.activations if n > world.start.node)
    del world.known.values[inner]
    assert world.outputs() is None
    world.known.set_value(inner, world.whole.value(inner))
    del world.known.values[upper]
    outputs = world.outputs()
    assert outputs is not None
    assert outputs.count == int((world.whole.value(inner) > 0).sum())


def test_with_them_a_batch_comes_back_that_gradients_leave_open() -> None:
    """80 numbers of each parity have 64 equations, or 128 between rows and columns; one bit of the signals is wrong."""
    world = World(5)
    users = [world.layers[name] for name in ("one.weight", "short.weight")]
    signals = [world.known.layer_signal(number) for number in users]
    assert solve_input(signals) is None
    bits = signals[0].bits
    assert bits is not None
    right = bits.clone()
    bits[0, 3, 1, 1] ^= True
    again = [KnownSignal(s.layer, s.signal, s.bits, s.slope) for s in signals]
    solved = solve_input(again, world.outputs())
    assert solved is not None
    assert float((solved.values - world.true).norm() / world.true.norm()) < 1e-4
    assert again[0].bits is not None
    assert torch.equal(again[0].bits, right)


def test_a_wrong_tensor_misses_them_but_a_wrong_bit_alone_does_not_count() -> None:
    world = World(2)
    outputs = world.outputs()
    assert outputs is not None
    assert outputs.misfit(world.true) < 1e-10
    assert outputs.misfit(1.1 * world.true) > 1e-2
    above = next(ref for ref in world.known.values if ref.node > world.start.node)
    turned = world.known.values[above].clone()
    closed = (turned == 0).nonzero()[0].tolist()
    turned[tuple(closed)] = turned.max()
    world.known.set_value(above, turned)
    outputs = world.outputs()
    assert outputs is not None
    assert outputs.misfit(world.true) < 1e-10


def test_equations_held_back_are_missed_where_the_others_leave_the_tensor_open() -> None:
    world = World(2)
    outputs = world.outputs()
    assert outputs is not None
    kept, held = outputs.hold_back(0.2)
    assert kept.count + held.count == outputs.count
    assert 0.1 < held.count / outputs.count < 0.3
    for one, other in zip(kept.outputs, held.outputs, strict=True):
        assert not bool((one.known & other.known).any())
    unseen = torch.zeros_like(world.true)
    for _ in range(2000):  # gradient descent from zero: it answers those kept, by a tensor that is none of the batch
        unseen = unseen + 0.01 * kept.pull([t - f for t, f in zip(kept.right_side(), kept.push(unseen), strict=True)])
    assert kept.misfit(unseen) < 1e-2 < 0.3 < held.misfit(unseen)
    assert held.misfit(world.true) < 1e-10


class Identity(nn.Module):
    """A bottleneck block with an identity for its shortcut, behind one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 32, 3, padding=1)
        self.one, self.two, self.three = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        inner = torch.relu(self.two(torch.relu(self.one(x))))
        return self.head(torch.relu(self.three(inner) + x).mean((2, 3)))


def test_a_skip_connection_tells_single_numbers_outright_and_bounds_the_others() -> None:
    world = World(1, kind=Identity)
    outputs = world.outputs()
    assert outputs is not None
    entries, mixed = outputs.split_entries(nonnegative=True)
    assert entries is not None
    assert entries.upper is not None
    inner, _, upper = (world.whole.value(Ref(n)) for n in world.network.activations if n > world.start.node)
    assert torch.equal(entries.known, upper > 1e-4 * upper.max())
    assert torch.allclose(entries.values[entries.known], world.true[entries.known], atol=1e-10)
    assert bool((world.true <= entries.upper + 1e-10).all())
    assert mixed.count == int((inner > 1e-4 * inner.max()).sum())


def test_a_bottleneck_comes_back_by_signs_and_by_what_its_skip_connection_carries() -> None:
    """16 equations of a channel for 64 numbers, of which two thirds are carried to open activations."""
    world = World(1, kind=Identity)
    signals = [world.known.layer_signal(world.layers["one.weight"])]
    outputs = world.outputs()
    assert outputs is not None
    assert "for 64 numbers" in count_shortfall(signals, outputs.count)
    entries, mixed = outputs.split_entries(nonnegative=True)
    assert entries is not None
    assert not count_shortfall(signals, mixed.count, entries)
    solved = solve_input(signals, mixed, entries)
    assert solved is not None
    assert float((solved.values - world.true).norm() / world.true.norm()) < 1e-4
    few = replace(entries, known=entries.known & (torch.arange(8) < 4))
    assert "the others are known outright" in count_shortfall(signals, mixed.count, few)
    assert solve_input(signals, None, few) is None


def test_a_search_that_runs_out_of_time_says_so_instead_of_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, kind=Identity)
    above = [SolvedTensor(ref, values, 1e-7, True, ()) for ref, values in world.known.values.items()]
    solvers = [GraphSolver(world.network, 1, world.known.snapshot(), above[:], scaled=True) for _ in range(2)]
    solvers[0]._solve_tensor(world.start)
    assert world.start in solvers[0].known.values
    monkeypatch.setattr("attacks.analytic.graph.joint_least_squares.MAX_SECONDS", 0.0)
    solvers[1]._solve_tensor(world.start)
    assert world.start not in solvers[1].known.values
    assert solvers[1].ends["one.weight"].endswith("ran out of its 0 CPU seconds")
