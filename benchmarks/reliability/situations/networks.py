"""Networks of the situations, each drawn from a fixed seed, as `module:function` of the command or called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fl.data import datasets
from fl.runtime.user_code import global_generator

CLASSES = 10


def drawn(construct: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return what `construct` makes where the global generator starts at `seed`."""
    with global_generator(seed):
        return construct()


@cache
def photos(size: int = 32) -> tuple[Tensor, Tensor]:
    """Return eight photographs (8, 3, size, size) in [0, 1] and their labels."""
    data = datasets.build({"name": "photos", "size": size}).load()
    return torch.cat([data.train.inputs, data.test.inputs]), torch.cat([data.train.labels, data.test.labels])


def dense(channels: int = 3, size: int = 32) -> nn.Module:
    """Return a network whose first layer takes the whole picture."""
    inputs = channels * size * size
    return drawn(lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, CLASSES)))


def lenet(activation: Callable[[], nn.Module] = nn.Sigmoid) -> nn.Module:
    """Return the LeNet of gradient inversion's papers: three convolutions without pooling."""
    return drawn(lambda: nn.Sequential(*_strided(activation), nn.Flatten(), nn.Linear(768, CLASSES)))


def _strided(activation: Callable[[], nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, stride in ((3, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(before, 12, 5, stride, 2), activation()]
    return layers


def normed() -> nn.Module:
    """Return a convolution with batch norm before a linear layer, in evaluation mode."""

    def construct() -> nn.Module:
        layers = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(16 * 1024, CLASSES))

    return drawn(construct).eval()


class Adapted(nn.Module):
    """A linear layer beside a frozen one, with the names that PEFT gives (LoRA, Hu et al., ICLR 2022)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        last = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(last.weight, std=0.1)  # zero before the first round, and then the other adapter has no gradient
        self.lora_B = nn.ModuleDict({"default": last})

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, out) of (B, in)."""
        adapted: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return adapted


def adapted() -> nn.Module:
    """Return a dense network whose layers have adapters, as after a first round."""

    def construct() -> nn.Module:
        layers = Adapted(nn.Linear(3072, 64)), nn.ReLU(), Adapted(nn.Linear(64, CLASSES))
        return nn.Sequential(nn.Flatten(), *layers)

    return drawn(construct)


def pruned() -> nn.Module:
    """Return a dense network whose first layer has 30 % of its weights under a mask."""
    model = dense()
    prune.l1_unstructured(model.get_submodule("1"), "weight", 0.3)
    return model


class Tied(nn.Module):
    """A network whose last layer is its second, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3072, 32), nn.Linear(32, CLASSES), nn.Linear(32, CLASSES)
        self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        hidden = self.first(x.flatten(1)).relu()
        logits: Tensor = self.second(hidden) + self.last(hidden)
        return logits


def tied() -> nn.Module:
    """Return a network of tied weights."""
    return drawn(Tied)
