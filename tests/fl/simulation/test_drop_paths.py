"""Which branches stochastic depth left out, where one lies inside another, or behind it, or shares its weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl.seeds import stream
from fl.simulation.drop_paths import find_drop_paths, read_drop_paths

WIDTH = 6


class DropPath(nn.Module):
    """Leaves out a branch by chance; passes it on scaled, or shifted as well."""

    def __init__(self, rate: float = 0.5, shift: float = 0.0) -> None:
        super().__init__()
        self.rate, self.shift, self.factor = rate, shift, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch times 0 or a scale."""
        if not self.training or not self.rate:
            return x
        self.factor = float(torch.rand(()) >= self.rate) / (1 - self.rate)
        return (x + self.shift) * self.factor


class Block(nn.Module):
    """Adds a branch to its input."""

    def __init__(self, branch: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.branch, self.drop = branch, drop

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        shown: Tensor = x + self.drop(self.branch(x))
        return shown


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def nested() -> nn.Module:
    """A block whose branch is another block after a layer of its own."""
    return Block(nn.Sequential(layer(), Block(layer(), DropPath())), DropPath())


def bare() -> nn.Module:
    """A block whose branch is another block and nothing else."""
    return Block(nn.Sequential(Block(layer(), DropPath())), DropPath())


def in_a_row() -> nn.Module:
    """A branch that is left out by either of two."""
    return Block(nn.Sequential(layer(), DropPath()), DropPath())


def sharing() -> nn.Module:
    """Two branches with one layer."""
    one = layer()
    return nn.Sequential(Block(one, DropPath()), Block(one, DropPath()))


def network(block: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), block, nn.Linear(WIDTH, 3))
    for name, value in model.named_parameters():
        value.data = torch.rand(value.shape, generator=stream(0, name)) - 0.5
    return model.train()


def drawn(model: nn.Module, states: tuple[float, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of a step in which modules drew these factors, and the picture."""
    for module, state in zip(drops(model).values(), states, strict=True):
        module.register_forward_hook(lambda module, given, _, state=state: (given[0] + module.shift) * state)
    picture = torch.rand(1, 1, 4, 4, generator=stream(0, "picture"))
    weights = dict(model.named_parameters())
    loss = nn.functional.cross_entropy(model(picture), torch.tensor([1]))
    parts = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    pairs = zip(weights.items(), parts, strict=True)
    return {n: torch.zeros_like(value) if part is None else part for (n, value), part in pairs}, picture


def drops(model: nn.Module) -> dict[str, DropPath]:
    return {name: module for name, module in model.named_modules() if isinstance(module, DropPath)}


def read(block: Callable[[], nn.Module], states: tuple[float, ...]) -> list[float | None]:
    update, picture = drawn(network(block()), states)
    model = network(block())
    found = read_drop_paths(model, picture, update)
    return [float(found[name]) if name in found else None for name in drops(model)]


@pytest.mark.parametrize("states", [(0.0, 2.0), (2.0, 0.0), (2.0, 2.0)])
def test_a_branch_inside_another_is_told_by_the_weights_of_each(states: tuple[float, ...]) -> None:
    """What lies in a branch that was left out makes no difference."""
    inner, outer = states
    assert read(nested, states) == ([inner, outer] if outer else [0.0, 0.0])


def test_a_branch_that_has_no_weights_but_those_of_another_is_not_told() -> None:
    """It passed its input on where the one inside was left out; that it was left out itself is another update."""
    assert read(bare, (2.0, 2.0)) == [2.0, 2.0]
    assert read(bare, (0.0, 2.0)) == [None, None]


def test_which_one_of_two_in_a_row_left_a_branch_out_makes_no_difference() -> None:
    for states in ((0.0, 2.0), (2.0, 0.0), (0.0, 0.0)):
        assert read(in_a_row, states) == [0.0, 0.0]


def test_branches_that_share_their_weights_are_not_told() -> None:
    assert read(sharing, (0.0, 2.0)) == [None, None]


@pytest.mark.parametrize(("drop", "scale"), [(DropPath(0.2), 1.25), (DropPath(0.0), None), (DropPath(0.5, 1.0), None)])
def test_a_module_is_known_by_what_it_returns(drop: DropPath, scale: float | None) -> None:
    model = network(Block(layer(), drop))
    found = find_drop_paths(model, torch.rand(1, 1, 4, 4))
    assert found == ({} if scale is None else {"2.drop": pytest.approx(scale)})
