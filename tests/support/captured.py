"""The small network whose updates are captured, and how clients train it."""

import copy

import torch
from torch import nn

from fl.seeds import stream
from fl.types import Batch

SHAPE, CLASSES = (1, 6, 6), 5


def network(norm: bool = False) -> nn.Sequential:
    """A convolution, with batch normalization or without, and a classifier for images of `SHAPE`."""
    layers = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.Sigmoid(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, CLASSES))
    generator = stream(0, "captured")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def batch(count=1):
    """Random images, each of a class of its own."""
    return Batch(torch.rand(count, *SHAPE, generator=stream(0, "images")), torch.arange(count))


def after(model, data, lr=0.1, optimizer=torch.optim.SGD):
    """The state after one step."""
    trained = copy.deepcopy(model)
    rule = optimizer(trained.parameters(), lr=lr)
    nn.functional.cross_entropy(trained(data.inputs), data.labels).backward()
    rule.step()
    return {name: value.clone() for name, value in trained.state_dict().items()}


def change(model, data, **settings):
    """The whole state before one step minus that after."""
    new = after(model, data, **settings)
    return {name: value - new[name] for name, value in model.state_dict().items()}
