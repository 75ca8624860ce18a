"""Victims of attacks that undo a network layer by layer: part of a photograph, chains of layers, in float64."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from skimage import data
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from attacks import Reconstruction
from attacks.base import build
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.layers import Normalize
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView

STEP = FedAvg(lr=1.0, steps=1)
LEAKY = nn.LeakyReLU(0.01)
POOLED = (nn.Conv2d(1, 12, 3, padding=1), nn.MaxPool2d(2), LEAKY)


def photograph(size: int, channels: int = 1) -> Tensor:
    """Part of a photograph (1, C, size, size) in [0, 1]."""
    whole = torch.tensor(data.astronaut()).permute(2, 0, 1)[None].double() / 255
    small = avg_pool2d(whole[..., 40:264, 120:344], 224 // size)
    return small.mean(1, keepdim=True) if channels == 1 else small


def network(*layers: nn.Module, size: int = 14, channels: int = 1, seed: int = 0) -> Task:
    """A chain of layers on normalized images, a linear layer to 12 features behind it, and a classifier."""
    shape = (channels, size, size)
    normalize = Normalize((0.4,) * channels, (0.3,) * channels)
    body = nn.Sequential(*map(copy.deepcopy, layers), nn.Flatten()).eval()
    body.append(nn.Linear(body(torch.zeros(1, *shape)).shape[1], 12))
    body.append(nn.LeakyReLU(0.1))
    model = nn.Sequential(OrderedDict(normalize=normalize, body=body, head=nn.Linear(12, 3))).double()
    draw = stream(seed, "weights")
    with torch.no_grad():
        for name, value in model.named_parameters():
            fan = value[0].numel() if value.ndim > 1 else 4
            value.copy_(torch.randn(value.shape, generator=draw, dtype=value.dtype) * fan**-0.5)
            if "norm" in name:
                value.abs_().add_(0.5)
    return Task(model, shape, 3, head="head.", mean=(0.4,) * channels, std=(0.3,) * channels)


def victim(task: Task, image: Tensor, method: Method = STEP) -> ServerView:
    image = image.to(next(iter(task.parameters.values())).dtype)
    batch = Batch(image, torch.tensor([1]))
    return Federation(Client(task, method), [ClientData(batch, batch)]).observe(0)[0]


def attack(view: ServerView, name: str = "cascade") -> Reconstruction:
    result = build(name)(view)
    assert isinstance(result, Reconstruction), result
    return result


def error(result: Reconstruction, image: Tensor) -> float:
    assert result.inputs is not None
    return float((result.inputs.double() - image).abs().max())
