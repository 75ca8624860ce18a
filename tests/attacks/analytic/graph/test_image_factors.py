"""Signals get their size where a network begins to be solved anew, each beginning for itself."""

import torch
from torch import Tensor, nn

from attacks.analytic.backsolve import _read_network
from attacks.analytic.graph.propagation import Propagation
from attacks.analytic.graph.solver import GraphSolver
from attacks.base import NotApplicable
from attacks.network.operation_trace import IMAGE, Ref
from attacks.update.step_gradient import exact_step_gradient
from fl.capture import from_batch


class DenseNetwork(nn.Module):
    """Layers whose outputs are put beside what they took: no bias above them is added to these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 5, 4, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (32, 64, 96))
        self.layers = nn.ModuleList(nn.Conv2d(n, 32, 3, padding=1, bias=False) for n in (32, 64))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem((x - 0.5) / 0.25)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return self.head(self.norms[-1](x).relu().mean((2, 3)))


def test_every_beginning_finds_its_own_size_by_biases_below() -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = DenseNetwork().eval()
    images = torch.rand(1, 3, 16, 16, generator=draw)
    view, _ = from_batch(model, images, torch.tensor([3]))
    gradient = exact_step_gradient(view, batches=True)
    assert not isinstance(gradient, NotApplicable)
    network = _read_network(view, gradient, 1)
    assert not isinstance(network, NotApplicable)
    solver = GraphSolver(network, 1, Propagation(network))
    solver.run()
    assert len(solver.solved) == 2
    for tensor in solver.solved:
        true = network.graph.replay(
            network.operations_to([tensor.ref]), tensor.ref, {Ref(IMAGE): images.to(tensor.values)}
        )
        assert tensor.scaled
        assert float((tensor.values - true).norm()) < 1e-3 * float(true.norm())
