"""From the classifier's signal the same layers are solved for more precisely."""

import pytest
import torch
from torch import Tensor, nn

from attacks.analytic.backsolve import _read_network
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.second_descent import descend_again
from attacks.analytic.graph.solver import GraphSolver
from attacks.base import NotApplicable
from attacks.network.operation_trace import IMAGE, Ref
from attacks.update.step_gradient import exact_step_gradient
from fl.capture import from_batch


class NarrowNetwork(nn.Module):
    """Residual blocks whose maps have hardly more channels than positions, so that shifts tell them badly."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, 4)
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = (x + second(first(x).relu())).relu()
        return self.head(x.mean((2, 3)))


def first_descent(count: int) -> tuple[GraphSolver, Tensor]:
    """A descent that begins with the shifts of a gradient."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(count)
        model = NarrowNetwork(17 * count)
    images = torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(count))
    view, _ = from_batch(model, images, torch.arange(count))
    gradient = exact_step_gradient(view, batches=True)
    assert not isinstance(gradient, NotApplicable)
    network = _read_network(view, gradient, count)
    assert not isinstance(network, NotApplicable)
    solver = GraphSolver(network, count, Propagation(network))
    solver.run()
    return solver, images


def errors(solver: GraphSolver, images: Tensor) -> dict[Ref, float]:
    """By which share of itself each solved tensor is off, its images in any order."""
    found, graph = {}, solver.network.graph
    for tensor in solver.solved:
        true = graph.replay(
            solver.network.operations_to([tensor.ref]), tensor.ref, {Ref(IMAGE): images.to(tensor.values)}
        )
        order = torch.cdist(tensor.values.flatten(1), true.flatten(1)).argmin(1)
        found[tensor.ref] = float((tensor.values - true[order]).norm() / true.norm())
    return found


@pytest.fixture(autouse=True)
def tried_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second descents are tried where a first one left no more than in a network of several blocks."""
    monkeypatch.setattr("attacks.analytic.graph.second_descent.MIN_MISFIT", 3e-6)


@pytest.mark.parametrize(("count", "times"), [(1, 100.0), (2, 1.2)])
def test_a_second_descent_is_more_precise(count: int, times: float) -> None:
    """Of one image the classifier's bias gradient is what flows back; of several its own error goes along."""
    first, images = first_descent(count)
    before, after = errors(first, images), errors(second := descend_again(first), images)
    assert second is not first
    assert second.anchor == first.anchor
    assert min(after, key=lambda ref: ref.node).node <= min(before, key=lambda ref: ref.node).node
    for ref, error in before.items():
        assert after[ref] < error / times


def test_what_is_as_precise_as_rounding_is_not_solved_for_again() -> None:
    first, _ = first_descent(1)
    second = descend_again(first)
    assert descend_again(second) is second
