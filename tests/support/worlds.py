"""The tiny federation that the contract runs on: 1x8x8 images, three classes, float64."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.models import build
from fl.seeds import stream
from fl.simulation.client_round import RoundKey, observe, prepare
from fl.types import Batch, Task
from fl.view import ServerView

CLASSES = 3
ADAPTERS: dict[str, Any] = {"stages": 2, "blocks": 1, "width": 4, "image_size": 16, "input_shape": (1, 8, 8)}


def task(**settings: Any) -> Task:
    """The network "tiny" in float64; `settings` are its own."""
    return build("tiny", num_classes=CLASSES, seed=0, **settings).to(dtype=torch.float64)


def deeper() -> Task:
    """The same with a second convolution, 4 -> 4 channels, 3x3, after the pooling."""
    given = task()
    layer = nn.utils.skip_init(nn.Conv2d, 4, 4, 3, padding=1, bias=False, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=0.2, generator=stream(0, "conv2"))
    layers = dict(given.model.get_submodule("body").named_children())
    at = list(layers).index("pool1") + 1
    model = copy.deepcopy(given.model)
    model.body = nn.Sequential(OrderedDict([*list(layers.items())[:at], ("conv2", layer), *list(layers.items())[at:]]))
    return replace(given, model=model)


def normed() -> Task:
    """The same with batch normalization, and before it no bias, whose gradient is zero up to rounding."""
    given = task(batch_norm=True)
    model = copy.deepcopy(given.model)
    model.get_submodule("body.conv1").register_parameter("bias", None)
    return replace(given, model=model)


def strided() -> Task:
    """The same with strides in place of pooling."""
    given = task()
    model = copy.deepcopy(given.model)
    body = model.get_submodule("body")
    convolution = body.get_submodule("conv1")
    assert isinstance(convolution, nn.Conv2d)
    convolution.stride = (2, 2)
    body.add_module("pool1", nn.Identity())  # in the place of the pooling
    return replace(given, model=model)


def flat() -> Task:
    """Linear layers alone."""
    return build("mlp", num_classes=CLASSES, seed=0, input_shape=(1, 8, 8)).to(dtype=torch.float64)


class Patched(nn.Module):
    """A vision transformer without attention: four patches with learned positions, layers over each, their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(1, 8, 4, stride=4), nn.Parameter(torch.zeros(1, 4, 8))
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).mT + self.position
        out: Tensor = self.head(torch.tanh(self.mix(tokens)).mean(1))
        return out


def patched() -> Task:
    """Patches with learned positions."""
    model, draw = Patched().double(), stream(0, "patched")
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=draw, dtype=value.dtype))
    return Task(model, (1, 8, 8), CLASSES, "head.")


class Residual(nn.Module):
    """A convolution with stride, and a block beside which the features pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, stride=2, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(32, 24, 3, padding=1), nn.Conv2d(24, 32, 3, padding=1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        below = torch.relu(self.stem(x))
        above = torch.relu(below + self.conv2(torch.relu(self.conv1(below))))
        out: Tensor = self.head(above.mean((2, 3)))
        return out


def residual() -> Task:
    """A residual network without pooling, but for the mean over all positions at the end."""
    model, draw = Residual().double(), stream(0, "residual")
    with torch.no_grad():
        for value in model.parameters():
            size = value[0].numel() if value.ndim > 1 else 100
            value.copy_(torch.randn(value.shape, generator=draw, dtype=value.dtype) * (2 / size) ** 0.5)
    return Task(model, (1, 8, 8), CLASSES, "head.")


def adapted() -> Task:
    """A frozen network with two adapters, which train."""
    return build("resnet18-adapter", num_classes=CLASSES, seed=0, **ADAPTERS).to(dtype=torch.float64)


def images(n: int, *keys: object, shape: tuple[int, int, int] = (1, 8, 8)) -> Batch:
    """Labeled noise."""
    generator = stream(0, "images", n, *keys)
    inputs = torch.rand(n, *shape, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(0, CLASSES, (n,), generator=generator))


def moved(batch: Batch, device: str) -> Batch:
    """The same on `device`."""
    return Batch(batch.inputs.to(device), batch.labels.to(device))


def federation(
    method: Method,
    defense: Defense | None = None,
    task_: Task | None = None,
    *,
    seed: int = 0,
    rounds: int = 1,
    device: str = "cpu",
) -> Federation:
    """Three clients of four images each, after `rounds` rounds."""
    client = Client((task_ or task()).to(device=device), method, defense or Defense())
    data = [ClientData(moved(images(4, "train", i), device), moved(images(4, "test", i), device)) for i in range(3)]
    run = Federation(client, data, seed=seed)
    for _ in range(rounds):
        run.run_round()
    return run


def victim(method: Method, defense: Defense, task_: Task, device: str) -> ServerView:
    """What the server sees of one step on a single image in the second round."""
    run = federation(method, defense, task_, device=device)
    client = Client(run.client.base, one_step(run.client.method), run.client.defense)
    image = moved(images(1, "victim"), device)
    return observe(prepare(client, run.clients[1], run.download(1), image, key=RoundKey(round=1)))[0]


def one_step(method: Method) -> Method:
    """`method` with one step on all images, without decay, momentum and clipping, where it has such settings."""
    plain = {"steps": 1, "epochs": None, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0, "max_norm": None}
    plain["head_epochs"] = 0
    return replace(method, **{name: value for name, value in plain.items() if hasattr(method, name)})
