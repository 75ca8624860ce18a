"""Normalizations in training mode and residual blocks are told by what they do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.backsolve import _read_network
from attacks.analytic.graph.batch_normalization import find_normalizations, read_statistics
from attacks.analytic.graph.batch_statistics import NormalizedConvolution
from attacks.analytic.graph.batch_statistics_blocks import LinearShortcut
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.residual_blocks import BlockChain, cut_into_blocks
from attacks.base import NotApplicable
from attacks.update.step_gradient import exact_step_gradient
from fl.capture import from_batch
from fl.view import ServerView


class HandwrittenNormalization(nn.Module):
    """Batch normalization in training mode, by plain operations and other names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stretch, self.offset = nn.Parameter(torch.ones(channels) * 1.5), nn.Parameter(torch.zeros(channels) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean((0, 2, 3), keepdim=True)
        root = (centered.square().mean((0, 2, 3), keepdim=True) + 1e-3).sqrt()
        return centered / root * self.stretch[:, None, None] + self.offset[:, None, None]


class Block(nn.Module):
    """A residual block with any normalization, whose shortcut drops pixels and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module], *, conv_shortcut: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.first, self.second, self.third = norm(outputs), norm(outputs), norm(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, 2) if conv_shortcut else None
        self.more = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.two(torch.relu(self.first(self.one(x)))))
        if self.down is not None:
            return functional.relu(self.third(self.down(x)) + inner)
        return functional.relu(inner + functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more)))


class Network(nn.Module):
    """A stem and two blocks."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.low, self.high = Block(8, 12, norm, conv_shortcut=True), Block(12, 16, norm, conv_shortcut=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.high(self.low(torch.relu(self.norm(self.stem(x))))).mean((2, 3)))


def traced(model: nn.Module) -> tuple[ServerView, NetworkGraph]:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    view, _ = from_batch(model, images, torch.tensor([1, 2]))
    gradient = exact_step_gradient(view, batches=True)
    assert not isinstance(gradient, NotApplicable)
    network = _read_network(view, gradient, 2)
    assert isinstance(network, NetworkGraph)
    return view, network


def blocks_of(model: nn.Module) -> BlockChain:
    view, network = traced(model)
    return cut_into_blocks(network, find_normalizations(network), read_statistics(view, network.graph.image))


def test_training_mode_is_told_by_what_it_does() -> None:
    _, network = traced(Network().train())
    found = find_normalizations(network)
    names = [network.layers[number].name for number in found]
    assert sorted(names) == sorted(n for n, p in Network().named_parameters() if p.ndim == 4)
    by_name = {network.layers[number].name: norm for number, norm in found.items()}
    norm = by_name["low.one.weight"]
    assert (norm.gamma_name, norm.beta_name) == ("low.first.weight", "low.first.bias")
    assert abs(norm.eps - 1e-5) < 1e-9
    assert torch.allclose(norm.gamma, torch.ones(12, dtype=torch.float64))


class AtOnePosition(Network):
    """Normalizes channels of one position, so that no picture runs alone in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(torch.relu(self.norm(self.stem(x)))).mean((2, 3), keepdim=True)
        return self.head(self.high(low).flatten(1))


def test_channels_of_one_position_are_normalized_over_the_batch() -> None:
    _, network = traced(AtOnePosition().train())
    assert len(find_normalizations(network)) == sum(p.ndim == 4 for p in AtOnePosition().parameters())


def test_other_normalizations_are_none_in_training_mode() -> None:
    assert not find_normalizations(traced(Network().eval())[1])
    assert not find_normalizations(traced(Network(lambda channels: nn.GroupNorm(2, channels)).train())[1])


def test_one_channel_in_evaluation_mode_is_none_in_training_mode() -> None:
    layers = nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    assert not find_normalizations(traced(nn.Sequential(*layers).eval())[1])
    assert find_normalizations(traced(nn.Sequential(*layers).train())[1])


def test_a_normalization_by_plain_operations_is_told() -> None:
    _, network = traced(Network(HandwrittenNormalization).train())
    found = find_normalizations(network)
    by_name = {network.layers[number].name: norm for number, norm in found.items()}
    norm = by_name["low.one.weight"]
    assert (norm.gamma_name, norm.beta_name) == ("low.first.stretch", "low.first.offset")
    assert abs(norm.eps - 1e-3) < 1e-9
    assert torch.allclose(norm.gamma, torch.full((12,), 1.5, dtype=torch.float64))
    assert torch.allclose(norm.beta, torch.full((12,), 0.1, dtype=torch.float64))


def test_blocks_are_cut_with_their_shortcuts() -> None:
    chain = blocks_of(Network().train())
    high, low = chain.blocks
    assert isinstance(high.block.shortcut, LinearShortcut)
    assert isinstance(low.block.shortcut, NormalizedConvolution)
    assert (low.block.first.name, low.block.second.name) == ("low.one.weight", "low.two.weight")
    assert low.block.shortcut.name == "low.down.weight"
    assert low.output == high.taken
    assert low.block.first.stride == 2


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_statistics_are_those_of_the_clients_batch(momentum: float | None) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = Network(lambda channels: nn.BatchNorm2d(channels, momentum=momentum)).train()
    chain = blocks_of(model)
    seen: list[Tensor] = []
    model.low.one.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    model(images)
    norm = chain.blocks[1].block.first.norm
    bias = model.low.one.bias
    assert bias is not None
    plain = seen[0] - bias[:, None, None]
    assert torch.allclose(norm.mean.float(), plain.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.variance.float(), plain.var((0, 2, 3), unbiased=False), rtol=1e-3, atol=1e-5)


def test_a_normalization_without_running_statistics_is_named() -> None:
    chain = blocks_of(Network(HandwrittenNormalization).train())
    assert not chain.blocks
    assert "no buffer keeps" in chain.end


def test_blocks_of_three_convolutions_are_named() -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 1)])
            self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            inner = x
            for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                inner = norm(conv(inner))
                inner = torch.relu(inner) if place < 2 else inner
            return torch.relu(inner + x)

    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(stem, Bottleneck(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).train()
    chain = blocks_of(model)
    assert not chain.blocks
    assert "1.convs.1.weight" in chain.end
