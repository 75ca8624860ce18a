"""A network with weights of its own for every sample, against running one sample after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl.models.building_blocks.per_sample import PerSampleNetwork
from fl.models.resnet20 import BasicBlock
from fl.seeds import stream


class Mixer(nn.Module):
    """A module with parameters of its own beside those of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2)
        return (rows @ rows.mT).softmax(-1) @ self.inner(rows) * self.scale


class Tied(nn.Module):
    """One layer used twice, and one parameter of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.second(torch.relu(self.first(x)))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)),
    "bare": lambda: nn.Linear(8, 2),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(12, 2),
    ),
    "groups": lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.Tanh(), nn.LayerNorm(8), nn.PReLU(3)),
    "mixer": lambda: nn.Sequential(Mixer(), nn.Flatten(), nn.Linear(24, 2)),
    "tied": Tied,
}


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(5, 3, 1, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_it_equals_one_sample_after_the_other(name: str) -> None:
    draw = stream(0, name)
    images = batch(draw)
    if name == "bare":
        images = images[:, 0, 0]
    elif name == "convolutions":
        images = images.view(5, 3, 2, 4)
    with torch.random.fork_rng():
        template = NETWORKS[name]().double()
    net = PerSampleNetwork(template)
    assert not list(net.parameters())
    assert net.total == sum(p.numel() for p in template.parameters())
    flat = torch.randn(5, net.total, generator=draw, dtype=torch.float64)
    found = net(images, flat)
    for i in range(5):
        own, at = {}, 0
        for key, value in template.named_parameters():
            part = flat[i, at : at + value.numel()].view_as(value)
            norm = isinstance(template.get_submodule(key.rpartition(".")[0]), nn.GroupNorm | nn.LayerNorm)
            own[key] = part + 1 if norm and key.endswith("weight") else part
            at += value.numel()
        alone = copy.deepcopy(template)  # torch leaves a module that stands under two names changed
        torch.testing.assert_close(found[i], functional_call(alone, own, (images[i : i + 1],))[0])
    assert all(module.given == {} for module in net.modules() if hasattr(module, "given"))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_shares_statistics_but_not_weights(training: bool) -> None:
    draw = stream(0, "norm")
    block = BasicBlock(2, 4, stride=2).double()
    block.norm1.running_mean += 0.3
    net = PerSampleNetwork(copy.deepcopy(block)).train(training)
    images = torch.randn(6, 2, 6, 6, generator=draw, dtype=torch.float64)
    around = {name: 1.0 if "norm" in name and name.endswith("weight") else 0.0 for name, _ in block.named_parameters()}
    same = torch.cat([v.detach().flatten() - around[name] for name, v in block.named_parameters()])
    block.train(training)
    torch.testing.assert_close(net(images, same.expand(6, -1)), block(images))
    running = dict(net.named_buffers())
    assert len(running) == 6
    for name, value in block.named_buffers():
        inside = "network." + name.replace("norm1.", "norm1.inner.").replace("norm2.", "norm2.inner.")
        torch.testing.assert_close(running[inside], value)
    moved = same.repeat(6, 1)
    moved[2] += 0.1
    apart = (net(images, moved) - net(images, same.expand(6, -1))).flatten(1).abs().amax(1) > 1e-9
    assert bool(apart[2])
    if not training:
        assert apart.tolist() == [False, False, True, False, False, False]


def test_gradients_are_those_of_each_sample() -> None:
    draw = stream(0, "gradient")
    net = PerSampleNetwork(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double())
    images = torch.randn(3, 1, 4, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    flat = torch.randn(3, net.total, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, (images, flat))


def test_frozen_layers_are_the_same_for_all() -> None:
    template = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    template[1].requires_grad_(False)
    net = PerSampleNetwork(template)
    assert net.total == 10
    assert [name for name, _ in net.named_parameters()] == ["network.1.weight", "network.1.bias"]
    images = torch.randn(3, 4, generator=stream(0), dtype=torch.float64)
    flat = torch.cat([p.detach().flatten() for p in template[2].parameters()]).expand(3, -1)
    torch.testing.assert_close(net(images, flat), template(images))


def test_what_it_can_not_run_it_refuses() -> None:
    partly = nn.Linear(2, 2)
    partly.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen as a whole"):
        PerSampleNetwork(partly)
    mixed = Mixer()
    mixed.norm = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="no batch norm or dropout below"):
        PerSampleNetwork(mixed)
