"""Residual networks are solved alike however their forward is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from support.residual import Block, ResNet, assert_exact, pictures
from torch import Tensor, nn
from torch.nn import functional

import attacks
from fl.capture import from_batch

Activation: TypeAlias = Callable[[Tensor], Tensor]
Shortcut: TypeAlias = Callable[[Block, Tensor], Tensor]


class Written(nn.Module):
    """The small residual network, with activations and shortcuts written in another way."""

    def __init__(self, activation: Activation = torch.relu, shortcut: Shortcut = lambda block, x: block.shortcut(x)):
        super().__init__()
        self.net, self.activation, self.shortcut = ResNet(), activation, shortcut

    def forward(self, x: Tensor) -> Tensor:
        net, act = self.net, self.activation
        x = act(net.norm(net.stem(x)))
        for block in net.blocks:
            assert isinstance(block, Block)
            inner = act(block.bn1(block.conv1(x)))
            x = act(block.bn2(block.conv2(inner)) + self.shortcut(block, x))
        out: Tensor = net.head(x.mean((2, 3)))
        return out


def written(activation: Activation = torch.relu, shortcut: Shortcut = lambda block, x: block.shortcut(x)) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return Written(activation, shortcut).eval()


def padded(block: Block, x: Tensor) -> Tensor:
    """A shortcut without parameters: channels of zeros beside those that it takes."""
    if isinstance(block.shortcut, nn.Identity):
        return x
    x = functional.avg_pool2d(x, 2)
    missing = len(block.conv2.weight) - x.shape[1]
    return torch.cat([x, torch.zeros_like(x).repeat(1, missing // x.shape[1] + 1, 1, 1)[:, :missing]], 1)


@pytest.mark.parametrize(
    ("attack", "shortcut"),
    [
        ("backsolve", padded),
        ("cascade", padded),
        ("backsolve", lambda block, x: block.shortcut(x) + 0 * x.argmax() + torch.zeros_like(x).mean()),
    ],
)
def test_operations_that_pass_no_gradient_end_no_attack(attack: str, shortcut: Shortcut) -> None:
    images, labels = pictures(1)
    view, _ = from_batch(written(shortcut=shortcut), images, labels)
    assert_exact(attacks.build(attack)(view), images)
